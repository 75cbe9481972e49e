"""What ckptool asks of a client of stores, and what that says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

AT_ONCE = 16
"""Concurrent requests: a store's answers take long, however many there are."""
_PIECE = 1 << 20
"""Bytes that are handed to a client together, which joins them to parts."""


class ObjectInfo(NamedTuple):
    """A file of a store: its size in bytes, and its version (an ETag or a time)."""

    nbytes: int
    version: str
    modified: float


class ObjectVersion(NamedTuple):
    """A file as it was listed: its key, and its version (an ETag or a time; empty if unknown)."""

    key: str
    version: str


class Pieces:
    """The contents of a file as pieces of its own, in order, of about ``_PIECE`` bytes.

    ``sent`` are the bytes of those that were taken, ``error`` is what the contents raised.
    """

    def __init__(self, contents: Iterable[memoryview | bytes]) -> None:
        self._contents = iter(contents)
        self.sent = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytearray]:
        return self

    def __next__(self) -> bytearray:
        piece = bytearray()
        try:
            while len(piece) < _PIECE:
                piece += next(self._contents)
        except StopIteration:
            if not piece:
                raise
        except BaseException as error:
            self.error = error
            raise
        self.sent += len(piece)
        return piece


def hidden_name(path: str) -> str:
    """Return a file's name until it is complete, for stores that show unfinished files."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.partial"


class Upload(NamedTuple):
    """A file to upload: its bytes, those of each part but the last, and how many parts at once."""

    nbytes: int
    part: int
    at_once: int


class PartsRemain(OSError):
    """A store refused to discard the parts of an unfinished file; ``status`` is its answer's."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status
