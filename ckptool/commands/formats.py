"""The formats that are known, and what can be done with each."""

from __future__ import annotations

from typing import NamedTuple

from ckptool.formats import CONVERTERS, FORMATS, WRITERS


class KnownFormat(NamedTuple):
    """A format: whether it is read, and written by convert and by reshard."""

    name: str
    reads: bool
    converts: bool
    reshards: bool
    summary: str


def known_formats() -> tuple[KnownFormat, ...]:
    """Every format, in the order in which they are looked for."""
    known = [(f.name, f.reads, f.name in CONVERTERS, f.summary) for f in FORMATS.values()]
    checkpointing = ("torch-checkpointing", True, False, "torch_checkpointing's rank files")
    return tuple(
        KnownFormat(name, reads, converts, name in WRITERS, summary)
        for name, reads, converts, summary in (*known, checkpointing)
    )
