"""A box of a tensor that is read wider than it was asked for, for the boxes beside it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.read.scaled import Array
from ckptool.storage.local import SPAN

Read = Callable[[TensorEntry, Box], Array]


class Windows:
    """Reads boxes that are some columns of many rows: a read of these passes all the others.

    Where a second box of a tensor is asked for, as many columns are kept as half of SPAN holds;
    those of two tensors, values and scales, are.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[TensorEntry, Box, Array]] = {}

    def gather(self, read: Read, entry: TensorEntry, box: Box) -> Array:
        """Return a box of a whole tensor, as its elements are stored; not to be written to."""
        dim = _cut_dim(entry, box)
        if dim is None:
            return read(entry, box)
        kept = self._kept.get(id(entry))
        if kept is None or not kept[1].contains(box):
            wide = box if kept is None else _widened(entry, box, dim)
            others = [item for item in self._kept.values() if item[0] is not entry]
            kept = entry, wide, read(entry, wide)
            self._kept = {id(item[0]): item for item in (*others[-1:], kept)}
        where = box.relative_to(kept[1].lo)
        return np.ascontiguousarray(kept[2][tuple(map(slice, where.lo, where.hi))])


def _cut_dim(entry: TensorEntry, box: Box) -> int | None:
    """Return the last dim of which a box has a part only; None if that has many rows not."""
    cut = [d for d, n in enumerate(box.shape) if n < entry.shape[d]]
    has_rows = bool(cut) and math.prod(box.shape[: cut[-1]]) > 1
    return cut[-1] if has_rows else None


def _widened(entry: TensorEntry, box: Box, dim: int) -> Box:
    """Return a box that goes on along a dim until it has half of SPAN bytes."""
    each = box.volume // max(1, box.shape[dim]) * entry.source_dtype.itemsize
    stop = max(box.hi[dim], box.lo[dim] + SPAN // 2 // max(1, each))
    return Box(box.lo, (*box.hi[:dim], min(stop, entry.shape[dim]), *box.hi[dim + 1 :]))
