"""Dequantize: numbers from coarse ones and the scales of their blocks, as torch computes them.

The formulas are those of ``torch.distributed.checkpoint.quantized_hf_storage`` (torch 2.13): FP8
in blocks as DeepSeek-V3 stores it, and MXFP4 as gpt-oss does; and those of compressed-tensors
(0.20): packed integers, and NVFP4, of which ModelOpt has a dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import ScaledBlocks, Scheme, StridedPart, TensorEntry
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
    region, first = _part_region(at.part, box)
    numbers = _SCHEMES[at.scheme](gather, at, region, wanted)
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
    return (_read_floats(gather, at.values, box) * _spread_scales(gather, at, box)).to(wanted)


def _spread_scales(gather: Gather, at: ScaledBlocks, box: Box) -> Any:
    """Return the scale of each element, in 32 bits."""
    grid = _blocks(box, at.block)
    return _spread(_read_floats(gather, at.scales, grid), at, box, grid)


def _spread(of_blocks: Any, at: ScaledBlocks, box: Box, grid: Box) -> Any:
    """Return for each element what its block has."""
    import torch

    for dim, size in enumerate(at.block):
        which = torch.arange(box.lo[dim], box.hi[dim]) // size - grid.lo[dim]
        of_blocks = of_blocks.index_select(dim, which)
    return of_blocks


def _read_floats(gather: Gather, entry: TensorEntry, box: Box) -> Any:
    """Read a box of a tensor as floats of 32 bits."""
    import torch

    return _view_typed(gather(entry, box), entry.dtype).to(torch.float32)


def _dequantize_nvfp4(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Multiply floats of four bits by scales of 8 bits and one of all, in 32 bits.

    Two floats are in a byte, the first in its lower half. The scale of all divides the others
    (compressed-tensors) or multiplies them (ModelOpt).
    """
    import torch

    lo, hi = box.lo[-1] // 2, -(-box.hi[-1] // 2)
    pairs = torch.from_numpy(gather(at.values, Box((*box.lo[:-1], lo), (*box.hi[:-1], hi))))
    divides = at.scheme == "nvfp4/"
    # The sign of a zero is kept by compressed-tensors, not by ModelOpt.
    table = torch.tensor([*_FP4, -0.0 if divides else 0.0, *(-n for n in _FP4[1:])])
    numbers = table[torch.stack((pairs & 0x0F, pairs >> 4), -1).to(torch.long)].flatten(-2)
    first = box.lo[-1] - 2 * lo
    (whole,) = at.others
    of_all = _read_floats(gather, whole, Box.whole(whole.shape)).reshape(())
    grid = _blocks(box, at.block)
    scales = _read_floats(gather, at.scales, grid)
    scales = scales / of_all if divides else scales * of_all
    part = numbers[..., first : first + box.shape[-1]]
    return (part * _spread(scales, at, box, grid)).to(wanted)


def _dequantize_integers(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Subtract the zero points of packed integers, if any, and multiply by scales, in 32 bits.

    Integers are packed along the columns, zero points along the rows, in words of 32 bits, the
    lowest bits first, with half of their range added.
    """
    import torch

    bits = int(at.scheme.removeprefix("int"))
    numbers = _unpack(gather, at.values, box, -1, bits)
    if at.others:
        grid = _blocks(box, at.block)
        zeros = _unpack(gather, at.others[0], grid, -2, bits)
        numbers = numbers - _spread(zeros, at, box, grid)
    return (numbers.to(torch.float32) * _spread_scales(gather, at, box)).to(wanted)


def _unpack(gather: Gather, words: TensorEntry, box: Box, dim: int, bits: int) -> Any:
    """Return a box of integers that are packed along a dim, as integers of 32 bits."""
    import torch

    each = 32 // bits
    lo, hi = list(box.lo), list(box.hi)
    lo[dim], hi[dim] = box.lo[dim] // each, -(-box.hi[dim] // each)
    stored = np.ascontiguousarray(gather(words, Box(tuple(lo), tuple(hi)))).view("<u4")
    shifts = torch.arange(0, 32, bits)
    wide = torch.from_numpy(stored.astype(np.int64)).movedim(dim, -1).unsqueeze(-1)
    integers = ((wide >> shifts) & ((1 << bits) - 1)).flatten(-2) - (1 << (bits - 1))
    first = box.lo[dim] - lo[dim] * each
    kept = integers[..., first : first + box.shape[dim]]
    return kept.to(torch.int32).movedim(-1, dim)


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


_SCHEMES: Mapping[Scheme, Callable[[Gather, ScaledBlocks, Box, Any], Any]] = {
    "scaled": _dequantize_blocks,
    "mxfp4": _dequantize_mxfp4,
    "nvfp4/": _dequantize_nvfp4,
    "nvfp4*": _dequantize_nvfp4,
    "int4": _dequantize_integers,
    "int8": _dequantize_integers,
}
"""What computes a box of the numbers in 32 bits, rounded once to the type that is wanted."""
