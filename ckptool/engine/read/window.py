"""Boxes of a tensor that are read wider than requested, for the boxes beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.read.numbers import Array
from ckptool.storage.files import SPAN

Read = Callable[[TensorEntry, Box], Array]


class Windows:
    """Reads boxes of some columns of many rows, as reading these passes all others.

    From the second box of a tensor on, as many columns are kept as fit its share of SPAN: half of
    it, as of values and scales, or less if more tensors are read by turns.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[TensorEntry, Box, Array]] = {}
        self._most = 2

    def read_by_turns(self, count: int) -> None:
        """Keep columns of so many tensors from now on."""
        self._most = max(2, count)

    def gather(self, read: Read, entry: TensorEntry, box: Box) -> Array:
        """Return a box of a whole tensor, with its elements as stored; it is read-only."""
        dim = _cut_dim(entry, box)
        if dim is None:
            return read(entry, box)
        kept = self._kept.get(id(entry))
        if kept is None or not kept[1].contains(box):
            wide = box if kept is None else _widened(entry, box, dim, SPAN // self._most)
            others = [item for item in self._kept.values() if item[0] is not entry]
            kept = entry, wide, read(entry, wide)
            self._kept = {id(item[0]): item for item in (*others[1 - self._most :], kept)}
        where = box.relative_to(kept[1].lo)
        return np.ascontiguousarray(kept[2][tuple(map(slice, where.lo, where.hi))])


def _cut_dim(entry: TensorEntry, box: Box) -> int | None:
    """Return the last dim of which a box has only a part; None if that has few rows."""
    cut = [d for d, n in enumerate(box.shape) if n < entry.shape[d]]
    has_rows = bool(cut) and math.prod(box.shape[: cut[-1]]) > 1
    return cut[-1] if has_rows else None


def _widened(entry: TensorEntry, box: Box, dim: int, most: int) -> Box:
    """Return a box that goes on along a dim until it has so many bytes."""
    each = box.volume // max(1, box.shape[dim]) * entry.source_dtype.itemsize
    stop = max(box.hi[dim], box.lo[dim] + most // max(1, each))
    return Box(box.lo, (*box.hi[:dim], min(stop, entry.shape[dim]), *box.hi[dim + 1 :]))
