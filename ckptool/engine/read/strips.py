"""Rows of a tensor that are in the same consecutive chunks: found once, read often."""

from __future__ import annotations

from collections.abc import Iterable
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from ckptool.core.box import Box, contiguous
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.sharding.index import SharedBox
from ckptool.engine.read.containers import open_place
from ckptool.engine.read.runs import NotePiece
from ckptool.storage.local import SPAN, FileReader

Array = np.ndarray[Any, np.dtype[Any]]


class _Piece(NamedTuple):
    """A chunk's part of each row: ``width`` bytes, those of row ``i`` at ``start + i * width``.

    ``inside`` are the slices of an array of some rows that it fills.
    """

    at: Extent
    start: int
    width: int
    inside: tuple[slice, ...]


class Strip(NamedTuple):
    """All rows of ``box`` along ``dim``, of which each chunk has one run of bytes.

    At most ``most`` of them are read at once.
    """

    entry: TensorEntry
    dim: int
    box: Box
    pieces: tuple[_Piece, ...]
    most: int

    def holds(self, entry: TensorEntry, box: Box) -> bool:
        """Return whether a box is some whole rows of the strip."""
        if entry is not self.entry:
            return False
        (lo, hi), (low, high), dim = box, self.box, self.dim
        if not (low[dim] <= lo[dim] < hi[dim] <= high[dim] and hi[dim] - lo[dim] <= self.most):
            return False
        is_row = lo[dim + 1 :] == low[dim + 1 :] and hi[dim + 1 :] == high[dim + 1 :]
        return is_row and lo[:dim] == low[:dim] and hi[:dim] == high[:dim]

    def fill(
        self, values: Array, box: Box, reader: FileReader, scratch: memoryview, note: NotePiece
    ) -> None:
        """Read a box that it holds into a C-ordered array; ``note`` the pieces of records."""
        first, count = box.lo[self.dim], box.hi[self.dim] - box.lo[self.dim]
        memory = values.reshape(-1).view("u1").data
        for at, start, width, inside in self.pieces:
            is_all = len(self.pieces) == 1
            data = memory if is_all else scratch[: count * width]
            reader.read_into(at.file, start + first * width, data)
            if not is_all:
                part = values[inside]
                part[...] = np.frombuffer(data, values.dtype).reshape(part.shape)
            if at.record is not None:
                note(at.record, start + first * width, data)


def strip_of(
    entry: TensorEntry, box: Box, found: Iterable[tuple[Chunk, SharedBox]]
) -> Strip | None:
    """Return the strip of a box, given its chunks ``found`` and what each has of it.

    None if a chunk has only some of its rows, or not in one run of bytes.
    """
    shape, itemsize = box.shape, entry.source_dtype.itemsize
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if dim is None:
        return None
    low, high, volume, pieces = 0, entry.shape[dim], 0, list[_Piece]()
    for chunk, (_, common, local, where) in found:
        at = open_place(chunk.at, chunk.box.shape)
        if not isinstance(at, Extent) or at.ops or common.shape[dim] != shape[dim]:
            return None
        if not contiguous(at.strides[dim:], common.shape[dim:], itemsize):
            return None
        low, high = max(low, chunk.box.lo[dim]), min(high, chunk.box.hi[dim])
        volume += common.volume
        skip = map(mul, local.lo, at.strides)
        width = at.strides[dim]
        start = at.offset + sum(skip) - common.lo[dim] * width
        inside = list(map(slice, *where))
        inside[dim] = slice(None)
        pieces.append(_Piece(at, start, width, tuple(inside)))
    if volume != box.volume:
        return None
    whole = Box((*box.lo[:dim], low, *box.lo[dim + 1 :]), (*box.hi[:dim], high, *box.hi[dim + 1 :]))
    most = SPAN // max(piece.width for piece in pieces) if len(pieces) > 1 else high - low
    return Strip(entry, dim, whole, tuple(pieces), most)
