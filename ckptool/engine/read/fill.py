"""Fill memory with boxes of tensors: in the order of the files, on several threads, checked.

Reads of a source's tensors that check every record they touch on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, Packed, Record, TensorEntry, places, stored_places
from ckptool.core.layout import tiles
from ckptool.core.plan import ChunkIndex
from ckptool.engine.checksum import RecordCheck, crc32
from ckptool.engine.read.gather import Array, Gatherer
from ckptool.engine.read.rounding import cast
from ckptool.engine.threads import share_jobs
from ckptool.errors import Problem, damaged
from ckptool.storage.local import Files

TILE = 8 << 20
"""Bytes that are read into memory at a time, as long as one element is not larger."""


class Memory(Protocol):
    """Where the elements of a box go, bit by bit."""

    def part(self, where: Box) -> AbstractContextManager[Array]:
        """An array to fill for a part of the box, in coordinates that begin at 0."""


@dataclass(frozen=True, slots=True)
class ArrayMemory:
    """A numpy array of the box's shape, of elements as bits (``gather.unit``), strided or not."""

    values: Array

    def part(self, where: Box) -> AbstractContextManager[Array]:
        """The array's own elements."""
        inside: Any = (..., *map(slice, where.lo, where.hi))
        return nullcontext(self.values[inside])


class Wanted(NamedTuple):
    """``box`` of a tensor, which its chunks must cover, goes to ``memory``."""

    entry: TensorEntry
    box: Box
    memory: Memory


class _Piece(NamedTuple):
    wanted: Wanted
    tile: Box


def fill(wanted: Sequence[Wanted], source: Files, workers: int) -> None:
    """Read every box into its memory, from the files of its source; chunks must be located.

    Records that are read whole are compared with the checksum their writer stored; of those that
    are read in part nothing is known. Raises Damaged where one differs or a file ends early: the
    memory then holds what was read.
    """
    reads = CheckedReads(source)
    share_jobs(_jobs(wanted), workers, reads.gatherer, _fill_pieces)
    problems = reads.problems_so_far(one.entry for one in wanted)
    if problems:
        raise damaged(
            problems,
            subject="the source's data",
            hint="the bytes changed after they were written; take another copy of the file",
        )


def _jobs(wanted: Sequence[Wanted]) -> Iterator[list[_Piece]]:
    """The tiles of all boxes as the files have them; those of one blob are one thread's."""
    placed = sorted(((*_first_spot(one), at) for at, one in enumerate(wanted)))
    for *_, at in placed:
        one = wanted[at]
        cut = tiles(one.box, one.entry.source_dtype.itemsize, TILE)
        pieces = (_Piece(one, tile) for tile in cut)
        if any(_is_packed(chunk) for chunk in one.entry.chunks):
            yield list(pieces)
        else:
            yield from ([piece] for piece in pieces)


def _first_spot(wanted: Wanted) -> tuple[str, int]:
    """Where the first bytes of a box lie."""
    spots = [(c.at.file, c.at.offset) for c, _ in ChunkIndex(wanted.entry).find(wanted.box)]
    return min(spots, default=("", 0))


def _is_packed(chunk: Chunk) -> bool:
    return any(isinstance(at, Packed) for at in stored_places(chunk.at))


def _fill_pieces(gatherer: Gatherer, pieces: list[_Piece]) -> None:
    for (entry, box, memory), tile in pieces:
        with memory.part(tile.relative_to(box.lo)) as out:
            if entry.source_dtype == entry.dtype:
                gatherer.gather_into(out, entry, tile)
            else:
                out[...] = cast(gatherer.gathered(entry, tile), entry.source_dtype, entry.dtype)


class CheckedReads:
    """Makes the gatherers of one pass over a source, and knows the checksums of what they read."""

    def __init__(self, source: Files) -> None:
        self.source = source
        self._records = RecordCheck()

    def gatherer(self) -> Gatherer:
        """A gatherer for one thread."""
        return Gatherer(self.source, self._note)

    def problems(self, entries: Iterable[TensorEntry], workers: int) -> list[Problem]:
        """A problem for each record of these tensors that is not as it was written.

        Records of copies, and others that no gatherer has read whole, are read here. Raises
        Damaged where a file ends before a record does.
        """
        self._touch(entries)
        share_jobs(iter(self._records.unseen()), workers, self.gatherer, self._read)
        return self._records.problems()

    def problems_so_far(self, entries: Iterable[TensorEntry]) -> list[Problem]:
        """As ``problems``, of the records that gatherers have read whole; nothing is read."""
        self._touch(entries)
        return self._records.problems(without=set(self._records.unseen()))

    def _touch(self, entries: Iterable[TensorEntry]) -> None:
        for entry in entries:
            for place in places(entry):
                if isinstance(place, Extent) and place.record is not None:
                    self._records.touch(place.record, entry.name)

    def _note(self, record: Record, offset: int, data: memoryview) -> None:
        self._records.piece(record, offset, len(data), crc32(data))

    def _read(self, gatherer: Gatherer, record: Record) -> None:
        self._records.whole(record, gatherer.crc(record))
