"""LoRA and DoRA: a weight plus the product of two thin matrices, computed cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add
from typing import Any

import numpy as np
from msgspec import Struct, field

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.engine.formulas.doubles import as_doubles, from_doubles
from ckptool.engine.formulas.products import Factor, multiply, split
from ckptool.engine.read.numbers import Array

_FEWEST_COLUMNS, _MOST_COLUMNS = 32, 256
_MOST_ROWS = 64
_ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS uses one thread, whatever the machine."""
_PART, _BAND = 1 << 18, 1 << 18
"""Numbers of a sum, and of a band of columns of A, that exist as doubles at a time."""
_WHOLE_ROWS = 1 << 19
"""Numbers of whole rows that are read at a time for their lengths, and one cell's rows at least."""


Inside = tuple[Any, ...]
"""Where in a box some of its numbers are: of one matrix, a range of rows and one of columns."""


class LowRank(Struct, frozen=True):
    """``W + scale * (B @ A)``, as PEFT merges a LoRA: stored are W, B and A.

    Each number is computed in 64 bits and then cast once, as torch casts. W may have one dim before
    rows and columns, as experts, and so do B and A then. A product's last bit depends on the shapes
    of its factors. So they are always those of a cell of a grid that begins at the tensor's first
    element: a number is the same whichever tile it is computed in. The processor may decide that
    bit, too. It shows in one of 2 ** 45 numbers of 16 bits, but in one of 2 ** 29 of 32, for which
    products are therefore exact.
    """

    scale: float

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Compute a box of the sum, as bits of a type."""
        result: Array = np.empty(box.shape, f"u{dtype.itemsize}")
        with np.errstate(all="ignore"):  # what is not finite stays so
            for inside, numbers in self.numbers(gather, at, box, dtype):
                result[inside] = from_doubles(numbers, dtype)
        return result

    def numbers(
        self, gather: Gather, at: Computed, box: Box, dtype: DType
    ) -> Iterator[tuple[Inside, Array]]:
        """Yield the parts of a box, in one order, with the doubles of each."""
        weight = at.stored[0]
        bits = gather(weight, box)
        for index in np.ndindex(*box.shape[:-2]):
            matrix = tuple(map(add, box.lo, index))
            for part, product in _products(gather, at, matrix, box, is_exact=dtype.itemsize > 2):
                inside = (*index, *part)
                weights = as_doubles(bits[inside], weight.source_dtype)
                product *= self.scale
                yield inside, np.add(weights, product, out=product)


class Magnitudes(Struct, frozen=True):
    """``m * V / |V|`` of each row of ``V = W + scale * (B @ A)``, as PEFT merges a DoRA.

    Stored are W, B, A and m. The length of a row is over all its columns. The lengths of a cell's
    rows are kept, by the bytes of the type they are for: other tiles have these rows, too.
    """

    sums: LowRank
    lengths: dict[tuple[int, int], Array] = field(default_factory=dict)

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Compute a box of the rows, as bits of a type."""
        result: Array = np.empty(box.shape, f"u{dtype.itemsize}")
        magnitudes = at.stored[3]
        rows = Box((box.lo[0],), (box.hi[0],))
        with np.errstate(all="ignore"):  # a row of zeros has no direction, as for torch
            factors = as_doubles(gather(magnitudes, rows), magnitudes.source_dtype)
            factors = factors / self._lengths_of(gather, at, rows, dtype)
            for inside, numbers in self.sums.numbers(gather, at, box, dtype):
                result[inside] = from_doubles(factors[inside[0], None] * numbers, dtype)
        return result

    def _lengths_of(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Return the lengths of the rows of a box, computed for whole cells."""
        height, (most, columns) = rows_of_cell(at.stored[1].shape[-1]), at.part.shape
        (start,), (stop,) = box
        first, last = _align(start, stop, height, most)
        tops, size = range(first, last, height), dtype.itemsize
        step = max(1, _WHOLE_ROWS // (height * columns))
        for cells in (tops[n : n + step] for n in range(0, len(tops), step)):
            # without a lock: two threads that compute the same get the same
            if any((top, size) not in self.lengths for top in cells):
                rows = Box((cells[0], 0), (min(cells[-1] + height, most), columns))
                lengths = self._compute_lengths(gather, at, rows, dtype)
                for top in cells:
                    self.lengths[top, size] = lengths[top - cells[0] :][:height]
        result = np.concatenate([self.lengths[top, size] for top in tops])
        return result[start - first : stop - first]

    def _compute_lengths(self, gather: Gather, at: Computed, rows: Box, dtype: DType) -> Array:
        """Return the lengths of whole rows."""
        squares = np.zeros(rows.shape[0])
        for inside, numbers in self.sums.numbers(gather, at, rows, dtype):
            squares[inside[0]] += np.square(numbers).sum(axis=1)
        return np.sqrt(squares)


def low_rank_reads(at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
    """Yield that a box of a sum is computed of the same box, its rows of B and its columns of A."""
    weight, left, right = at.stored[:3]
    height, matrices = rows_of_cell(left.shape[-1]), (box.lo[:-2], box.hi[:-2])
    rows = _align(box.lo[-2], box.hi[-2], height, weight.shape[-2])
    columns = _align(box.lo[-1], box.hi[-1], columns_of_band(left.shape[-1]), weight.shape[-1])
    yield weight, box
    yield left, Box((*matrices[0], rows[0], 0), (*matrices[1], rows[1], left.shape[-1]))
    yield right, Box((*matrices[0], 0, columns[0]), (*matrices[1], right.shape[-2], columns[1]))


def magnitude_reads(at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
    """Yield that a box is computed of all columns of its rows, and of these rows' magnitudes."""
    most, columns = at.part.shape
    rows = _align(box.lo[0], box.hi[0], rows_of_cell(at.stored[1].shape[-1]), most)
    yield from low_rank_reads(at, Box((rows[0], 0), (rows[1], columns)))
    yield at.stored[3], Box((box.lo[0],), (box.hi[0],))


def columns_of_cell(rank: int) -> int:
    """Return the columns of a cell, of which each is one multiplication of matrices.

    A high rank leaves fewer columns, and fewer rows: for two rows BLAS would read all of A's
    columns, of 256 more than the processor's cache has.
    """
    most = max(1, _ONE_THREAD // (_FEWEST_COLUMNS * rank))
    return max(_FEWEST_COLUMNS, min(1 << (most.bit_length() - 1), _MOST_COLUMNS))


def rows_of_cell(rank: int) -> int:
    """Return the rows of a cell, as many as one thread multiplies."""
    return max(1, min(_MOST_ROWS, _ONE_THREAD // (columns_of_cell(rank) * rank)))


def columns_of_band(rank: int) -> int:
    """Return the columns of a band, whole cells: fewer the more rows of A it has."""
    cell = columns_of_cell(rank)
    return max(1, min(_PART // rows_of_cell(rank), _BAND // rank) // cell) * cell


def _products(
    gather: Gather, at: Computed, matrix: tuple[int, ...], box: Box, *, is_exact: bool
) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """Yield the parts that a box has of one matrix, with their products, in bands of columns."""
    factor = split if is_exact else _keep_whole
    weight, left, right = at.stored[:3]
    rank, (most_rows, most_columns) = left.shape[-1], weight.shape[-2:]
    height, cell, width = rows_of_cell(rank), columns_of_cell(rank), columns_of_band(rank)
    top, bottom = _align(box.lo[-2], box.hi[-2], height, most_rows)

    def rows_of(first: int, last: int) -> Array:
        bits: Array = gather(left, _box_in(matrix, (first, 0), (last, rank)))
        return bits.reshape(last - first, rank)

    # else read again for each band of columns: all rows of B would take too much memory
    is_small = (bottom - top) * rank <= _WHOLE_ROWS
    box_bits = rows_of(top, bottom) if is_small else None
    for start in range(box.lo[-1] // width * width, box.hi[-1], width):
        stop = min(start + width, most_columns)
        columns, own_columns = _intersect(start, stop, box.lo[-1], box.hi[-1])
        bits = gather(right, _box_in(matrix, (0, start), (rank, stop))).reshape(rank, stop - start)
        cells = factor(_cut_into_cells(as_doubles(bits, right.source_dtype), cell), 1)
        most = height if is_exact else _PART // max(len(cells.high) * cell, rank)
        for row, count in _rows_at_once(top, bottom, height, most):
            part = rows_of(row, row + count) if box_bits is None else box_bits[row - top :][:count]
            numbers = as_doubles(part, left.source_dtype)
            blocks = numbers.reshape(-1, min(count, height), rank)
            product = np.empty((*blocks.shape[:2], len(cells.high), cell))
            multiply(factor(blocks, 2), cells, np.moveaxis(product, 2, 0))
            rows, own_rows = _intersect(row, row + count, box.lo[-2], box.hi[-2])
            yield (own_rows, own_columns), product.reshape(count, -1)[rows, columns]


def _rows_at_once(top: int, bottom: int, height: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the count of rows that are computed at a time: whole cells.

    The last rows, which may be a lower cell, are computed by themselves.
    """
    whole, step = top + (bottom - top) // height * height, max(1, most // height) * height
    for row in range(top, whole, step):
        yield row, min(step, whole - row)
    if whole < bottom:
        yield whole, bottom - whole


def _cut_into_cells(columns: Array, width: int) -> Array:
    """Return columns by cells, of which the last may be filled up with zeros."""
    rank, count = columns.shape
    cells = -(-count // width)
    filled = np.zeros((rank, cells * width))
    filled[:, :count] = columns
    return np.ascontiguousarray(filled.reshape(rank, cells, width).swapaxes(0, 1))


def _keep_whole(matrix: Array, rank_dim: int) -> Factor:
    """Return a matrix as it is."""
    return Factor(matrix)


def _box_in(matrix: tuple[int, ...], low: tuple[int, int], high: tuple[int, int]) -> Box:
    """Return the box of a part of one matrix; ``matrix`` is its index if there are several."""
    return Box((*matrix, *low), (*(n + 1 for n in matrix), *high))


def _align(start: int, stop: int, step: int, most: int) -> tuple[int, int]:
    """Return the whole steps around a range, up to the last index."""
    return start // step * step, min(-(-stop // step) * step, most)


def _intersect(start: int, stop: int, low: int, high: int) -> tuple[slice, slice]:
    """Return the intersection of two ranges, as a slice of each."""
    first, last = max(start, low), min(stop, high)
    return slice(first - start, last - start), slice(first - low, last - low)
