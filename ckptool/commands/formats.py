"""The formats that are known, and what can be done with each."""

from __future__ import annotations

from typing import NamedTuple

from ckptool.formats import FORMATS


class KnownFormat(NamedTuple):
    """A format: whether it is read, and written by convert and by reshard."""

    name: str
    reads: bool
    converts: bool
    reshards: bool
    summary: str


def known_formats() -> tuple[KnownFormat, ...]:
    """Return every format, in the order in which they are looked for."""
    return tuple(
        KnownFormat(
            row.name, row.reads, row.convert is not None, row.reshard is not None, row.summary
        )
        for row in FORMATS.values()
    )
