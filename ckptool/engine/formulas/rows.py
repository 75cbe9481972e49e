"""Other rows of a tensor: those of tokens that were trained apart, and of a larger vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import tiles
from ckptool.engine.formulas.doubles import as_doubles, from_doubles
from ckptool.engine.read.gather import unit
from ckptool.engine.read.numbers import Array, part_of
from ckptool.engine.read.rounding import cast

MEAN, ZEROS = "mean", "zeros"
_PIECE = 1 << 20
"""Bytes of the rows that are added up at a time."""


class ReplacedRows(Struct, frozen=True):
    """The first tensor, with row ``rows[i]`` replaced by row ``i`` of the second."""

    rows: tuple[int, ...]

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Copy a box, as bits of a type, each number cast at most once."""
        whole = at.stored[0]
        result: Array = cast(gather(whole, box), whole.source_dtype, dtype).copy()
        entry = at.stored[1]
        for row, part in self._parts(box):
            numbers = cast(gather(entry, part), entry.source_dtype, dtype)
            result[row - box.lo[0]] = numbers[0]
        return result

    def reads(self, at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
        """Yield that a box is made of the same box, and of the rows that replace some of its."""
        yield at.stored[0], box
        for _, part in self._parts(box):
            yield at.stored[1], part

    def _parts(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield each replaced row that a box has, and what of the second tensor replaces it."""
        for index, row in enumerate(self.rows):
            if box.lo[0] <= row < box.hi[0]:
                yield row, Box((index, *box.lo[1:]), (index + 1, *box.hi[1:]))


class MoreRows:
    """The rows of a tensor, and after them rows that are all alike, filled by a rule.

    They are the ``mean`` of the rows there are, ``zeros``, or one of the rows, by its number. The
    mean is the sum of the rows, in order and in 64 bits, over their count, cast once.
    """

    def __init__(self, fill: str | int) -> None:
        self._fill = fill
        self._lock = threading.Lock()
        self._mean: Array | None = None

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Compute a box of all rows, as bits of a type."""
        base = at.stored[0]
        result: Array = np.empty(box.shape, unit(dtype.itemsize))
        base_box = _rows_of(base, box)
        if base_box.volume:
            result[: base_box.shape[0]] = cast(gather(base, base_box), base.source_dtype, dtype)
        if box.hi[0] > base.shape[0]:
            result[base_box.shape[0] :] = self._new_row(gather, base, box, dtype)
        return result

    def reads(self, at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
        """Yield the boxes of the base's rows that a box is computed of."""
        base = at.stored[0]
        yield base, _rows_of(base, box)
        if box.hi[0] > base.shape[0]:
            if isinstance(self._fill, int):
                yield base, _row(self._fill, box)
            elif self._fill == MEAN:
                yield base, Box.whole(base.shape)

    def _new_row(self, gather: Gather, base: TensorEntry, box: Box, dtype: DType) -> Array:
        """Return the part of each new row that lies in a box."""
        if isinstance(self._fill, int):
            return cast(gather(base, _row(self._fill, box)), base.source_dtype, dtype)
        if self._fill == ZEROS:
            return np.zeros(box.shape[1:], unit(dtype.itemsize))
        with self._lock:  # other threads wait: each would read the whole tensor
            if self._mean is None:
                self._mean = _mean_of_rows(gather, base)
        part = part_of(self._mean, Box(box.lo[1:], box.hi[1:]))
        return from_doubles(part, dtype)


def _mean_of_rows(gather: Gather, base: TensorEntry) -> Array:
    """Return the mean of all rows as floats of 64 bits."""
    total: Array = np.zeros(base.shape[1:], "f8")
    with np.errstate(all="ignore"):  # what is not finite stays so
        for tile in tiles(Box.whole(base.shape), base.source_dtype.itemsize, _PIECE):
            rows = as_doubles(gather(base, tile), base.source_dtype).reshape(tile.shape)
            part = part_of(total, Box(tile.lo[1:], tile.hi[1:]))
            for row in rows:
                part += row
        return total / base.shape[0]


def _rows_of(base: TensorEntry, box: Box) -> Box:
    """Return the part of a box that lies in the base's own rows, which may be empty."""
    low, high = (min(side[0], base.shape[0]) for side in box)
    return Box((low, *box.lo[1:]), (high, *box.hi[1:]))


def _row(number: int, box: Box) -> Box:
    """Return the box of a row that has the same columns."""
    return Box((number, *box.lo[1:]), (number + 1, *box.hi[1:]))
