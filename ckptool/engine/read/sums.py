"""Checksums of what was read of a source, by which what is made of it is proved."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as xxh3

from ckptool.core.box import Box

Losses = tuple[tuple[str, int], ...]
_NOTE = Struct(">QQQ")
"""Offset, number of bytes, checksum: as bytes they sort as the numbers do."""


class ReadRun(NamedTuple):
    """Bytes of a file that were read at once, and their XXH3 of 64 bits."""

    offset: int
    nbytes: int
    checksum: int


class MadeBox(NamedTuple):
    """A box of a tensor whose elements were cast or computed, and the XXH3 of what they became.

    ``losses`` say how many were beyond the range of their type, and what these became.
    """

    box: Box
    checksum: int
    losses: Losses = ()


class ReadSums:
    """Notes the checksum of each run of bytes that is read of a source, on any of several threads.

    A note takes 24 bytes of memory: 24 MB for 1 TB that is read by the MiB. One of a box that was
    cast or computed takes 8, and 16 for each dim; ten times as much if numbers were lost. Once
    reading has ended, ``runs`` returns what was read, and ``made`` what was made of a tensor.
    """

    def __init__(self) -> None:
        self._notes: dict[str, bytearray] = {}
        self._sorted: dict[str, list[array[int]]] = {}
        self._boxes: dict[str, bytearray] = {}
        self._lossy: dict[str, list[MadeBox]] = {}

    def note_made(self, name: str, box: Box, data: bytes | memoryview, losses: Losses = ()) -> None:
        """Note elements of a box of a tensor as they are to be written."""
        if losses:
            self._lossy.setdefault(name, []).append(MadeBox(box, xxh3(data), losses))
        else:
            note = _note_of_box(len(box.lo)).pack(*box.lo, *box.hi, xxh3(data))
            self._boxes.setdefault(name, bytearray()).extend(note)

    def made(self, name: str, dims: int) -> list[MadeBox]:
        """Return the boxes that were noted of a tensor of so many dims, each once."""
        notes = _note_of_box(dims).iter_unpack(self._boxes.get(name, b""))
        boxes = [MadeBox(Box(note[:dims], note[dims:-1]), note[-1]) for note in notes]
        return list(dict.fromkeys([*boxes, *self._lossy.get(name, ())]))

    def note(self, file: str, offset: int, data: memoryview) -> None:
        """Note bytes that were read, before anything is done with them."""
        note = _NOTE.pack(offset, len(data), xxh3(data))
        self._notes.setdefault(file, bytearray()).extend(note)  # each is one step: it needs no lock

    def runs(self, file: str, start: int, end: int) -> Iterator[ReadRun]:
        """Yield what was read between two offsets of a file, in order and each run once."""
        columns = self._sorted.get(file)
        if columns is None:
            columns = self._sorted[file] = _sort(self._notes.pop(file, bytearray()))
        offsets, sizes, checksums = columns
        for at in range(bisect_left(offsets, start), len(offsets)):
            if offsets[at] >= end:
                return
            if offsets[at] + sizes[at] <= end:
                yield ReadRun(offsets[at], sizes[at], checksums[at])


@lru_cache
def _note_of_box(dims: int) -> Struct:
    """Return the layout of a box and a checksum."""
    return Struct(f">{2 * dims + 1}Q")


def _sort(notes: bytearray) -> list[array[int]]:
    """Return notes in order, each once, as columns: offsets, numbers of bytes, checksums."""
    size = _NOTE.size
    cut = sorted(bytes(notes[at : at + size]) for at in range(0, len(notes), size))
    numbers = array("Q", b"".join(note for note, _ in groupby(cut)))
    if sys.byteorder == "little":
        numbers.byteswap()
    return [numbers[column::3] for column in range(3)]
