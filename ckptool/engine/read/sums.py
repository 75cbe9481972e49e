"""Checksums of what was read of a source, by which what is made of it is proved."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as checksum

__all__ = ["ReadRun", "ReadSums", "checksum"]

_NOTE = Struct("<QQQ")


class ReadRun(NamedTuple):
    """Bytes of a file that were read at once, and their XXH3 of 64 bits."""

    offset: int
    nbytes: int
    checksum: int


class ReadSums:
    """Notes the checksum of each run of bytes that is read of a source, on any of several threads.

    A note takes 24 bytes of memory. Once reading has ended, ``runs`` returns what was read.
    """

    def __init__(self) -> None:
        self._notes: dict[str, bytearray] = {}

    def note(self, file: str, offset: int, data: memoryview) -> None:
        """Note bytes that were read, before anything is done with them."""
        note = _NOTE.pack(offset, len(data), checksum(data))
        self._notes.setdefault(file, bytearray()).extend(note)  # one step: it needs no lock

    def runs(self, file: str, start: int, end: int) -> list[ReadRun]:
        """Return what was read between two offsets of a file, in order and each run once."""
        runs = self._sorted.get(file, [])
        found = runs[bisect_left(runs, (start,)) : bisect_left(runs, (end,))]
        return [run for run in found if run.offset + run.nbytes <= end]

    @cached_property
    def _sorted(self) -> dict[str, list[ReadRun]]:
        notes = self._notes.items()
        return {file: sorted(set(map(ReadRun._make, _NOTE.iter_unpack(n)))) for file, n in notes}
