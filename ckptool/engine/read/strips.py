"""Rows of a tensor that are in the same consecutive chunks: found once, read often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Extent, TensorEntry
from ckptool.core.sharding.index import Overlap
from ckptool.engine.read.segments import run_at


class _Piece(NamedTuple):
    """A chunk's part of each row: ``width`` bytes, those of row ``i`` at ``start + i * width``.

    ``inside`` are the slices of an array of some rows that it fills.
    """

    at: Extent
    start: int
    width: int
    inside: tuple[slice, ...]


class Strip(Struct, frozen=True):
    """All rows of ``box`` along ``dim``, of which each chunk has one run of bytes."""

    entry: TensorEntry
    dim: int
    box: Box
    pieces: tuple[_Piece, ...]

    def holds(self, entry: TensorEntry, box: Box) -> bool:
        """Return whether a box is some whole rows of the strip."""
        if entry is not self.entry:
            return False
        (lo, hi), (low, high), dim = box, self.box, self.dim
        if not low[dim] <= lo[dim] < hi[dim] <= high[dim]:
            return False
        is_row = lo[dim + 1 :] == low[dim + 1 :] and hi[dim + 1 :] == high[dim + 1 :]
        return is_row and lo[:dim] == low[:dim] and hi[:dim] == high[:dim]

    def runs(self, box: Box) -> Iterator[tuple[Extent, int, tuple[slice, ...]]]:
        """Yield the runs of a box that it holds: place, file offset, and what they fill."""
        first = box.lo[self.dim]
        for at, start, width, inside in self.pieces:
            yield at, start + first * width, inside


def strip_of(entry: TensorEntry, box: Box, found: Iterable[Overlap]) -> Strip | None:
    """Return the strip of a box, given what each of its chunks, which are open, has of it.

    None if a chunk has only some of its rows, or not in one run of bytes.
    """
    shape, itemsize = box.shape, entry.source_dtype.itemsize
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if dim is None:
        return None
    low, high, volume, pieces = 0, entry.shape[dim], 0, list[_Piece]()
    for chunk, common, local, where in found:
        start = run_at(chunk.at, local, itemsize)
        if start is None or common.shape[dim] != shape[dim] or not isinstance(chunk.at, Extent):
            return None
        low, high = max(low, chunk.box.lo[dim]), min(high, chunk.box.hi[dim])
        volume += common.volume
        width = chunk.at.strides[dim]
        inside = list(map(slice, *where))
        inside[dim] = slice(None)
        pieces.append(_Piece(chunk.at, start - common.lo[dim] * width, width, tuple(inside)))
    if volume != box.volume:
        return None
    whole = Box((*box.lo[:dim], low, *box.lo[dim + 1 :]), (*box.hi[:dim], high, *box.hi[dim + 1 :]))
    return Strip(entry, dim, whole, tuple(pieces))
