"""Fill memory with boxes of tensors: in the order of the files, on several threads, checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, EncodedBlob, TensorEntry, stored_places
from ckptool.core.layout import tiles
from ckptool.core.plan import ChunkIndex
from ckptool.engine.checksum import require_intact
from ckptool.engine.read.gather import Array, Gatherer
from ckptool.engine.read.rounding import cast
from ckptool.engine.read.tensors import CheckedSource, TensorTile
from ckptool.engine.read.tiles import Job, read_tiles
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


def fill(wanted: Sequence[Wanted], source: Files, workers: int) -> None:
    """Read every box into its memory, from the files of its source; chunks must be located.

    Records that are read whole are compared with the checksum their writer stored; of those that
    are read in part nothing is known. Raises Damaged where one differs or a file ends early: the
    memory then holds what was read.
    """
    checked = CheckedSource(source)
    read_tiles(checked, _jobs(wanted), _exhaust, workers)
    require_intact(checked.problems_so_far(request.entry for request in wanted))


def _jobs(wanted: Sequence[Wanted]) -> Iterator[Job[Wanted, Gatherer, TensorTile]]:
    """Yield the tiles of all boxes as the files have them; those of one blob are one thread's."""
    placed = sorted(((*_first_spot(request), at) for at, request in enumerate(wanted)))
    for *_, at in placed:
        request = wanted[at]
        cut = tiles(request.box, request.entry.source_dtype.itemsize, TILE)
        is_packed = any(_is_packed(chunk) for chunk in request.entry.chunks)
        for boxes in [list(cut)] if is_packed else ([box] for box in cut):
            yield Job(request, partial(_fill_boxes, request, boxes))


def _exhaust(wanted: Wanted, filled: Iterator[TensorTile]) -> None:
    """Read all tiles: their memory is where they belong."""
    deque(filled, maxlen=0)


def _first_spot(wanted: Wanted) -> tuple[str, int]:
    """Where the first bytes of a box lie."""
    spots = [(c.at.file, c.at.offset) for c, _ in ChunkIndex(wanted.entry).find(wanted.box)]
    return min(spots, default=("", 0))


def _is_packed(chunk: Chunk) -> bool:
    return any(isinstance(at, EncodedBlob) for at in stored_places(chunk.at))


def _fill_boxes(wanted: Wanted, boxes: Sequence[Box], gatherer: Gatherer) -> Iterator[TensorTile]:
    """Yield tiles that are read into the memory where they belong."""
    entry, whole, memory = wanted
    for box in boxes:
        with memory.part(box.relative_to(whole.lo)) as out:
            if entry.source_dtype == entry.dtype:
                gatherer.gather_into(out, entry, box)
            else:
                out[...] = cast(gatherer.gathered(entry, box), entry.source_dtype, entry.dtype)
        yield TensorTile(box, out, box.volume * entry.source_dtype.itemsize)
