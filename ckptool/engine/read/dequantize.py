"""Dequantize: fill a part of a tensor with the numbers that its scheme computes.

The formulas are in ``core/quantization/schemes``.
"""

from __future__ import annotations

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Gather, ScaledBlocks, StridedPart
from ckptool.core.dtype import DType
from ckptool.engine.read.numbers import Array
from ckptool.errors import Unsupported


def fill_scaled(gather: Gather, at: ScaledBlocks, out: Array, box: Box, dtype: DType) -> None:
    """Compute the elements of a box, rounded to ``dtype`` once, into ``out``.

    ``gather`` reads a box of a tensor as stored.
    """
    try:
        import torch
    except ImportError:
        raise Unsupported("--dequantize needs torch", hint="pip install 'ckptool[torch]'") from None
    if not out.size:
        return
    wanted = getattr(torch, dtype.name)
    region, first, strides = least_box(at.part, box) or run_of_rows(at.part, box)
    numbers = at.compute(gather, at, region, wanted).contiguous()
    numbers = numbers.as_strided(box.shape, strides, numbers.storage_offset() + first)
    flat = numbers.contiguous().reshape(-1).view(torch.uint8).numpy()
    out[...] = flat.view(out.dtype).reshape(out.shape)


_Region = tuple[Box, int, tuple[int, ...]]
"""A box of the whole tensor, where in it a part's box begins, and the part's strides."""


def least_box(part: StridedPart, box: Box) -> _Region | None:
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


def run_of_rows(part: StridedPart, box: Box) -> _Region:
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
