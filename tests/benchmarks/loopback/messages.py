"""Requests to an S3 server, and its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct, field

_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Request(Struct, frozen=True):
    """One request; ``received`` and ``sent`` are bytes of its body and its answer's.

    Operations have the names of S3's own API; ``query`` also has the headers that count.
    """

    operation: str
    bucket: str
    key: str
    query: dict[str, str]
    range: str | None
    received: int
    sent: int = 0
    status: int = 0
    """0 if no answer was given."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def span(self, size: int | None = None) -> tuple[int, int]:
        """Return the first and the last byte requested; ValueError without a range."""
        match = _RANGE.fullmatch(self.range or "")
        if match is None:
            raise ValueError(self.range)
        if not match[1]:
            return max(0, (size or 0) - int(match[2])), (size or 0) - 1
        last = int(match[2]) if match[2] else (size or 0) - 1
        return int(match[1]), last if size is None else min(last, size - 1)


class Answer(Struct):
    """An answer; ``length`` is the stated length of the body if that is wrong."""

    status: int = 200
    body: bytes | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


class Dropped(Exception):
    """The connection ends without an answer."""


def make_error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an error in S3's form."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml", **(headers or {})})


def make_document(root: str, inside: str) -> Answer:
    """Return an XML document in S3's form."""
    body = f'{_XML}<{root} xmlns="{_XMLNS}">{inside}</{root}>'.encode()
    return Answer(200, body, {"Content-Type": "application/xml"})
