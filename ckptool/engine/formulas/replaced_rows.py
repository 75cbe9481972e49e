"""Rows of a tensor that are replaced by those of another, as separately trained tokens are."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.rounding import cast


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
