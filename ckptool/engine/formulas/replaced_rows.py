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
        for (entry, part), row in zip(self._parts(at, box), self._rows_in(box), strict=True):
            numbers = cast(gather(entry, part), entry.source_dtype, dtype)
            result[row - box.lo[0]] = numbers[0]
        return result

    def reads(self, at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
        """Yield that a box is made of the same box, and of the rows that replace some of its."""
        yield at.stored[0], box
        yield from self._parts(at, box)

    def _parts(self, at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
        for row in self._rows_in(box):
            index = self.rows.index(row)
            yield at.stored[1], Box((index, *box.lo[1:]), (index + 1, *box.hi[1:]))

    def _rows_in(self, box: Box) -> list[int]:
        """Return which of the replaced rows a box has."""
        return [row for row in self.rows if box.lo[0] <= row < box.hi[0]]
