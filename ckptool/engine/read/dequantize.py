"""Dequantize: numbers from coarse ones and the scales of their blocks, as torch computes them.

The formulas are those of ``torch.distributed.checkpoint.quantized_hf_storage`` (torch 2.13): FP8
in blocks as DeepSeek-V3 stores it, and MXFP4 as gpt-oss does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import ScaledBlocks, StridedPart, TensorEntry
from ckptool.core.dtype import DType
from ckptool.errors import Unsupported

Array = np.ndarray[Any, np.dtype[Any]]
Gather = Callable[[TensorEntry, Box], Array]

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a four-bit float (E2M1) without its sign."""


def fill_scaled(gather: Gather, at: ScaledBlocks, out: Array, box: Box, dtype: DType) -> None:
    """Compute the elements of a box, rounded to ``dtype`` once, into ``out``.

    ``gather`` reads a box of a tensor as it is stored.
    """
    try:
        import torch
    except ImportError:
        raise Unsupported("--dequantize needs torch", hint="pip install 'ckptool[torch]'") from None
    if not out.size:
        return
    wanted = getattr(torch, dtype.name)
    four_bits = at.values.dtype.name == "uint8"
    dequantize = _dequantize_mxfp4 if four_bits else _dequantize_blocks
    region, first = _part_region(at.part, box)
    numbers = dequantize(gather, at, region, wanted)
    if first is not None:
        numbers = numbers.contiguous().as_strided(box.shape, at.part.strides, first)
    flat = numbers.contiguous().reshape(-1).view(torch.uint8).numpy()
    out[...] = flat.view(out.dtype).reshape(out.shape)


def _part_region(part: StridedPart, box: Box) -> tuple[Box, int | None]:
    """Return what of the whole tensor holds all of a part's ``box``, and where in it that begins.

    Where the part is a box of the tensor, so is this, and the second value is None; else it is the
    least run of rows, along the first dim in which they are several.
    """
    rows, origin = row_major_strides(part.shape, 1), part.start
    if part.strides == rows:
        return box.relative_to([-n for n in _index(part.shape, origin)]), None
    first = origin + sum(i * s for i, s in zip(box.lo, part.strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.shape, part.strides, strict=True))
    lo, hi = _index(part.shape, first), _index(part.shape, last)
    dim = next((d for d, low in enumerate(lo) if low != hi[d]), len(lo))
    start = (*lo[: dim + 1], *(0 for _ in lo[dim + 1 :]))
    stop = (*(n + 1 for n in hi[: dim + 1]), *part.shape[dim + 1 :])
    return Box(start, stop), first - sum(i * row for i, row in zip(start, rows, strict=True))


def _index(shape: tuple[int, ...], element: int) -> list[int]:
    """Return the index of an element in row-major order."""
    rows = row_major_strides(shape, 1)
    return [element // row % size for row, size in zip(rows, shape, strict=True)]


def _dequantize_blocks(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Multiply values by their scales, in 32 bits."""
    import torch

    grid = _blocks(box, at.block)
    values = _view_typed(gather(at.values, box), at.values.dtype).to(torch.float32)
    scales = _view_typed(gather(at.scales, grid), at.scales.dtype).to(torch.float32)
    for dim, size in enumerate(at.block):
        which = torch.arange(box.lo[dim], box.hi[dim]) // size - grid.lo[dim]
        scales = scales.index_select(dim, which)
    return (values * scales).to(wanted)


def _dequantize_mxfp4(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Decode two numbers per byte, the lower half first, times 2 ** (scale - 127)."""
    import torch

    grid, size = _blocks(box, at.block), at.block[-1]
    pairs = torch.from_numpy(gather(at.values, Box((*grid.lo, 0), (*grid.hi, size // 2))))
    exponents = torch.from_numpy(gather(at.scales, grid)).to(torch.int32) - 127
    table = torch.tensor([*_FP4, *(-number for number in _FP4)], dtype=wanted)
    numbers = torch.empty((*grid.shape, size), dtype=wanted)
    numbers[..., 0::2] = table[(pairs & 0x0F).to(torch.long)]
    numbers[..., 1::2] = table[(pairs >> 4).to(torch.long)]
    torch.ldexp(numbers, exponents.unsqueeze(-1), out=numbers)
    rows = numbers.reshape(*grid.shape[:-1], grid.shape[-1] * size)
    start = box.lo[-1] - grid.lo[-1] * size
    return rows[..., start : start + box.shape[-1]]


def _blocks(box: Box, block: tuple[int, ...]) -> Box:
    """Return the blocks that a box touches, in counts of blocks."""
    return Box(
        tuple(lo // size for lo, size in zip(box.lo, block, strict=True)),
        tuple(-(-hi // size) for hi, size in zip(box.hi, block, strict=True)),
    )


def _view_typed(bits: Array, dtype: DType) -> Any:
    """View stored elements as a torch tensor of their type."""
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view("u1"))
    return flat.view(getattr(torch, dtype.name)).reshape(bits.shape)
