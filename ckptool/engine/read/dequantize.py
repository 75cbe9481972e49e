"""Dequantize: compute numbers from values and the scales of their blocks, as torch does.

The formulas are those of ``torch.distributed.checkpoint.quantized_hf_storage`` (torch 2.13): FP8 in
blocks as DeepSeek-V3 stores it, and MXFP4 as gpt-oss does; those of compressed-tensors (0.20):
packed integers, and NVFP4, of which ModelOpt has a variant; of AutoGPTQ (0.7), AutoAWQ (0.2),
bitsandbytes (0.50) and torchao (0.18). Those of ComfyUI are in ``core/quantization/comfy.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import ScaledBlocks, Scheme, StridedPart, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.quantization import comfy
from ckptool.core.quantization.blocks import (
    Array,
    Gather,
    blocks_of,
    read_floats,
    spread,
    spread_scales,
)
from ckptool.engine.read.packed_integers import (
    dequantize_awq,
    dequantize_gptq,
    dequantize_packed,
)
from ckptool.errors import Unsupported

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a four-bit float (E2M1) without its sign."""


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
    numbers = _SCHEMES[at.scheme](gather, at, region, wanted).contiguous()
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


def _dequantize_blocks(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Multiply values by their scales, in 32 bits."""
    return (read_floats(gather, at.values, box) * spread_scales(gather, at, box)).to(wanted)


def _dequantize_affine(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Subtract the integer zero points of blocks, and multiply by their scales."""
    zeros = read_floats(gather, at.others[0], blocks_of(box, at.block))
    numbers = read_floats(gather, at.values, box) - spread(zeros, at, box)
    return (numbers * spread_scales(gather, at, box)).to(wanted)


_ROW_FACTOR = 7.874015718698502e-3
"""1 / 127 as bitsandbytes uses it: ``int8_vectorwise_dequant`` (0.50)."""


def _dequantize_rows(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Multiply integers by the largest of their row and by 1 / 127, rounding each time."""
    scales = read_floats(gather, at.scales, Box(box.lo[:1], box.hi[:1])).unsqueeze(1)
    return (read_floats(gather, at.values, box) * scales * _ROW_FACTOR).to(wanted)


def _dequantize_codes(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Look up codes of four bits, the upper half of a byte first, and multiply by their scales.

    The scales of a nested quantization are codes of eight bits with scales of their own.
    """
    import torch

    table = read_floats(gather, at.others[0], Box.whole(at.others[0].shape))
    lo, hi = box.lo[0] // 2, -(-box.hi[0] // 2)
    pairs = _bytes_of(gather, at.values, lo, hi)
    codes = torch.stack((pairs >> 4, pairs & 0x0F), -1).flatten()
    first = box.lo[0] - 2 * lo
    numbers = table[codes[first : first + box.shape[0]].to(torch.long)]
    grid = blocks_of(box, at.block)
    return (numbers * spread(_absmax(gather, at, grid), at, box)).to(wanted)


def _absmax(gather: Gather, at: ScaledBlocks, grid: Box) -> Any:
    """Return the scales of blocks in 32 bits; nested ones are dequantized."""
    import torch

    scales = _flat(gather, at.scales, grid)
    if not at.settings:
        return scales
    size, offset = at.settings
    outer = blocks_of(grid, (int(size),))
    which = torch.arange(grid.lo[0], grid.hi[0]) // int(size) - outer.lo[0]
    of_all, table = at.others[1:]
    codes = read_floats(gather, table, Box.whole(table.shape))[scales.to(torch.long)]
    return codes * _flat(gather, of_all, outer)[which] + offset


def _flat(gather: Gather, entry: TensorEntry, box: Box) -> Any:
    """Read a run of the elements of a tensor with only one dim other than 1."""
    return read_floats(gather, entry, _widened(entry, box.lo[0], box.hi[0])).flatten()


def _widened(entry: TensorEntry, lo: int, hi: int) -> Box:
    """Return the box of a run of elements of a tensor with only one dim other than 1."""
    longest = max(range(len(entry.shape)), key=lambda dim: entry.shape[dim])
    start = tuple(lo if dim == longest else 0 for dim in range(len(entry.shape)))
    stop = tuple(hi if dim == longest else 1 for dim in range(len(entry.shape)))
    return Box(start, stop)


def _bytes_of(gather: Gather, entry: TensorEntry, lo: int, hi: int) -> Any:
    """Read a run of the bytes of a tensor with only one dim other than 1."""
    import torch

    size = entry.source_dtype.itemsize
    start = lo // size
    stored = gather(entry, _widened(entry, start, -(-hi // size)))
    flat = np.ascontiguousarray(stored).reshape(-1).view("u1")
    return torch.from_numpy(flat)[lo - start * size : hi - start * size]


def _dequantize_nvfp4(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Multiply floats of four bits by scales of 8 bits and one of all, in 32 bits.

    A byte has two floats, the first in its lower half. The scale of all divides the others
    (compressed-tensors) or multiplies them (ModelOpt); MXFP4 has none.
    """
    import torch

    lo, hi = box.lo[-1] // 2, -(-box.hi[-1] // 2)
    pairs = torch.from_numpy(gather(at.values, Box((*box.lo[:-1], lo), (*box.hi[:-1], hi))))
    divides = at.scheme == "nvfp4/"
    # compressed-tensors keeps the sign of a zero, ModelOpt does not
    table = torch.tensor([*_FP4, -0.0 if divides else 0.0, *(-n for n in _FP4[1:])])
    numbers = table[torch.stack((pairs & 0x0F, pairs >> 4), -1).to(torch.long)].flatten(-2)
    first = box.lo[-1] - 2 * lo
    scales = read_floats(gather, at.scales, blocks_of(box, at.block))
    for whole in at.others:
        of_all = read_floats(gather, whole, Box.whole(whole.shape)).reshape(())
        scales = scales / of_all if divides else scales * of_all
    part = numbers[..., first : first + box.shape[-1]]
    return (part * spread(scales, at, box)).to(wanted)


def _dequantize_mxfp4(gather: Gather, at: ScaledBlocks, box: Box, wanted: Any) -> Any:
    """Decode two numbers per byte, the lower half first, times 2 ** (scale - 127)."""
    import torch

    grid, size = blocks_of(box, at.block), at.block[-1]
    pairs = torch.from_numpy(gather(at.values, Box((*grid.lo, 0), (*grid.hi, size // 2))))
    # twice the values, since 2 ** 128 exceeds 32-bit floats, and half of it does not
    table = torch.tensor([2 * number for number in (*_FP4, *(-n for n in _FP4))], dtype=wanted)
    codes = torch.arange(256)
    both = torch.stack((table[codes & 0x0F], table[codes >> 4]), -1)
    words = both.view({2: torch.int32, 4: torch.int64, 8: torch.complex128}[wanted.itemsize])
    numbers = words.flatten().index_select(0, pairs.flatten().to(torch.int32)).view(wanted)
    numbers = numbers.reshape(*grid.shape, size)
    exponents = torch.from_numpy(gather(at.scales, grid)).to(torch.int32) - 128
    factors = torch.pow(2.0, exponents).unsqueeze(-1)
    # float16 lacks some of these powers of two: the product is rounded, not the factor
    numbers *= factors if wanted == torch.float16 else factors.to(wanted)
    rows = numbers.reshape(*grid.shape[:-1], grid.shape[-1] * size)
    start = box.lo[-1] - grid.lo[-1] * size
    return rows[..., start : start + box.shape[-1]]


_SCHEMES: Mapping[Scheme, Callable[[Gather, ScaledBlocks, Box, Any], Any]] = {
    "scaled": _dequantize_blocks,
    "mxfp4": _dequantize_mxfp4,
    "nvfp4/": _dequantize_nvfp4,
    "nvfp4*": _dequantize_nvfp4,
    "affine": _dequantize_affine,
    "packed": dequantize_packed,
    "gptq": dequantize_gptq,
    "awq": dequantize_awq,
    "rows": _dequantize_rows,
    "codes": _dequantize_codes,
    **comfy.SCHEMES,
}
"""The function that computes a box in 32 bits, which is rounded once to the requested type."""
