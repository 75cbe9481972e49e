"""Fill a part of a tensor with numbers that are computed of stored tensors.

The formulas are in ``core/quantization/schemes`` and ``engine/formulas``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptool.core.box import Box, row_major_strides
from ckptool.core.casts import computed_places
from ckptool.core.catalog import Computed, Gather, StridedPart, TensorEntry
from ckptool.core.dtype import DType

if TYPE_CHECKING:
    from ckptool.engine.read.numbers import Array


def tensors_behind(at: Computed) -> Iterator[TensorEntry]:
    """Yield the tensors that a place is computed of, and what these are computed of."""
    for entry in at.stored:
        yield entry
        for inner in computed_places(entry):
            yield from tensors_behind(inner)


def fill_computed(gather: Gather, at: Computed, out: Array, box: Box, dtype: DType) -> None:
    """Compute the elements of a box, rounded to ``dtype`` once, into ``out``.

    ``gather`` reads a box of a tensor as stored.
    """
    from numpy.lib.stride_tricks import as_strided

    if not out.size:
        return
    region, first, strides = region_of(at.part, box)
    numbers = at.compute(gather, at, region, dtype).reshape(-1)[first:]
    steps = tuple(stride * out.itemsize for stride in strides)
    out[...] = as_strided(numbers.view(out.dtype), box.shape, steps)


Region = tuple[Box, int, tuple[int, ...]]
"""A box of the whole tensor, where in it a part's box begins, and the part's strides."""


def region_of(part: StridedPart, box: Box) -> Region:
    """Return the smallest region of the whole tensor that is computed for a part's ``box``."""
    return least_box(part, box) or run_of_rows(part, box)


def least_box(part: StridedPart, box: Box) -> Region | None:
    """Return the smallest box of the whole tensor that contains a part's ``box``.

    None if a dim of the part does not run along one of the whole tensor.
    """
    rows = row_major_strides(part.shape, 1)
    first = part.start + sum(i * s for i, s in zip(box.lo, part.strides, strict=True))
    low = _index(part.shape, first)
    high, along = list(low), []
    for size, stride in zip(box.shape, part.strides, strict=True):
        dim = next((dim for dim, row in enumerate(rows) if row <= stride), None)
        if size > 1 and (dim is None or stride % rows[dim]):
            return None
        dim, step = (0, 0) if size == 1 or dim is None else (dim, stride // rows[dim])
        if step:
            high[dim] += (size - 1) * step
        along.append((dim, step))
    if any(n >= size for n, size in zip(high, part.shape, strict=True)):
        return None
    region = Box(tuple(low), tuple(n + 1 for n in high))
    inner = row_major_strides(region.shape, 1)
    return region, 0, tuple(step * inner[dim] if step else 1 for dim, step in along)


def run_of_rows(part: StridedPart, box: Box) -> Region:
    """Return the smallest run of rows, along one dim, that contains a part's ``box``."""
    rows = row_major_strides(part.shape, 1)
    first = part.start + sum(i * s for i, s in zip(box.lo, part.strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.shape, part.strides, strict=True))
    lo, hi = _index(part.shape, first), _index(part.shape, last)
    dim = next((d for d, low in enumerate(lo) if low != hi[d]), len(lo))
    start = (*lo[: dim + 1], *(0 for _ in lo[dim + 1 :]))
    stop = (*(n + 1 for n in hi[: dim + 1]), *part.shape[dim + 1 :])
    inside = first - sum(i * row for i, row in zip(start, rows, strict=True))
    return Box(start, stop), inside, part.strides


def _index(shape: tuple[int, ...], element: int) -> list[int]:
    """Return the index of an element in row-major order."""
    rows = row_major_strides(shape, 1)
    return [element // row % size for row, size in zip(rows, shape, strict=True)]
