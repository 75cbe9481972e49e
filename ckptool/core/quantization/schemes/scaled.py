"""Floats of 8 and 4 bits, and integers of 8, with scales for a tensor, rows, groups or blocks.

The formulas are those of ``torch.distributed.checkpoint.quantized_hf_storage`` (torch 2.13) for FP8
in blocks, and of compressed-tensors (0.20) for NVFP4, of which ModelOpt has a variant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Computed, Gather, TensorEntry
from ckptool.core.dtype import BY_NAME, EXPONENTS
from ckptool.core.quantization.blocks import (
    FP4,
    ComputeByTorch,
    blocks_of,
    read_codes,
    read_floats,
    read_spread,
    spread,
)
from ckptool.core.quantization.model import (
    Kind,
    Quantized,
    Scheme,
    Surroundings,
    Tensors,
    part_of_row,
)
from ckptool.core.views import insert_dim

_FP8_FORMATS = "float-quantized naive-quantized FP8 FP8_PER_CHANNEL_PER_TOKEN"
_FP8 = Kind("FP8", "compressed-tensors fbgemm_fp8 fp8 modelopt quark", _FP8_FORMATS)
_FP8_BLOCKS = Kind("FP8 in blocks", "compressed-tensors fp8 modelopt", _FP8_FORMATS)
_INT8 = Kind(
    "INT8",
    "compressed-tensors modelopt",
    "int-quantized naive-quantized W8A16 W8A8_SQ_PER_CHANNEL",
)
_MXFP8 = Kind("MXFP8", "compressed-tensors fp8 modelopt", "mxfp8-quantized MXFP8")
MXFP4 = Kind(
    "MXFP4", "compressed-tensors fp8 modelopt mxfp4", "mxfp4-pack-quantized W4A8_MXFP4_FP8"
)
_NVFP4 = Kind(
    "NVFP4",
    "compressed-tensors modelopt",
    "nvfp4-pack-quantized NVFP4 NVFP4_AWQ NVFP4_SVD W4A16_NVFP4 W4A8_NVFP4_FP8",
)
_PACKED = ".weight_packed"
_SCALES = {"_scale_inv": "", ".scale": ".weight", "_scale": "", ".qscale_weight": ".weight"}
"""The ends of scales' names, and what the names of their values have instead."""
_IN_BLOCKS = ("_scale_inv", ".scale")
_MX_GROUP, _NV_GROUP = 32, 16
_BLOCK = (128, 128)
"""DeepSeek-V3's, if no config states another size."""


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield 8-bit numbers with scales, and floats of 4 bits.

    DeepSeek-V3: ``X.weight`` in 8-bit floats and ``X.weight_scale_inv``. compressed-tensors, fbgemm
    and ModelOpt: ``X.weight`` in 8 bits and ``X.weight_scale``, fbgemm also ``X`` and ``X_scale``
    of experts (transformers 5.23, Llama 4). Mistral: ``X.weight`` and ``X.qscale_weight``. NVFP4 of
    ModelOpt: ``X.weight`` in bytes with ``X.weight_scale_2``; of compressed-tensors:
    ``X.weight_packed`` in bytes with ``X.weight_global_scale``; without that one, and with scales
    in bytes, MXFP4. MXFP8: ``X.weight`` in 8-bit floats, scales in bytes.
    DeepSeek-V4: ``X.scale`` for ``X.weight_scale_inv``, in exponents; ``X.weight`` in int8 is two
    floats of four bits each, as transformers 5.23 reads them.
    """
    tensors = catalog.tensors
    for name in names:
        if name.endswith(_PACKED):
            quantized = _find_packed(tensors, name)
        else:
            end = next(filter(name.endswith, _SCALES))
            weight = name.removesuffix(end) + _SCALES[end]
            find_scaled = _find_block_scaled if end in _IN_BLOCKS else _find_scaled
            quantized = find_scaled(tensors, weight, tensors[name]) if weight in tensors else None
        if quantized is not None:
            yield quantized


def _find_packed(tensors: Tensors, name: str) -> Quantized | None:
    """Return the floats of four bits in bytes, if they have scales."""
    weight, values = name.removesuffix("_packed"), tensors[name]
    scales, global_scale = tensors.get(f"{weight}_scale"), tensors.get(f"{weight}_global_scale")
    if values.dtype.name != "uint8" or scales is None:
        return None
    if global_scale is not None:
        return Quantized(_NVFP4, weight, values, scales, _lay_out_fp4, (global_scale,))
    if not is_mx(scales) or f"{weight}_shape" in tensors:
        return None
    return Quantized(MXFP4, weight, values, _powers(scales), _lay_out_fp4)


def _find_block_scaled(tensors: Tensors, name: str, scales: TensorEntry) -> Quantized | None:
    """Return the floats of a name with a scale per block, or with an exponent per group."""
    values = tensors[name]
    if values.dtype.is_float8:
        return Quantized(_FP8_BLOCKS, name, values, scales, _lay_out_scaled)
    if values.dtype.name != "int8" or scales.dtype.name != EXPONENTS:
        return None
    return Quantized(MXFP4, name, replace(values, dtype=BY_NAME["uint8"]), scales, _lay_out_fp4)


def _find_scaled(tensors: Tensors, name: str, scales: TensorEntry) -> Quantized | None:
    """Return the quantized tensor of a name with scales of the usual name."""
    values, global_scale = tensors[name], tensors.get(f"{scales.name}_2")
    zeros, order = tensors.get(f"{name}_zero_point"), tensors.get(f"{name}_g_idx")
    if global_scale is not None and values.dtype.name == "uint8":
        lay_out = partial(_lay_out_groups, partial(_compute_fp4, divides=False), 4)
        return Quantized(_NVFP4, name, values, scales, lay_out, (global_scale,))
    if values.dtype.is_float8 and is_mx(scales):
        return Quantized(_MXFP8, name, values, _powers(scales), _lay_out_mxfp8)
    is_integer = values.dtype.name == "int8"
    if not (values.dtype.is_float8 or is_integer) or order is not None or not values.shape:
        return None
    extras = () if zeros is None else (zeros,)
    return Quantized(_INT8 if is_integer else _FP8, name, values, scales, _lay_out_scaled, extras)


def is_mx(scales: TensorEntry) -> bool:
    """Return whether scales are power-of-two exponents, in bytes."""
    return scales.dtype.name in ("uint8", EXPONENTS)


def _powers(scales: TensorEntry) -> TensorEntry:
    """Return bytes that are power-of-two exponents with their real type."""
    return replace(scales, dtype=BY_NAME[EXPONENTS])


def _lay_out_scaled(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out numbers with one scale for all, per row, per group of a row, or per block."""
    pair.require_type(pair.scales, "float")
    shape, grid = pair.values.shape, pair.scales.shape
    for entry in pair.extras:
        if entry.shape != grid or entry.dtype.kind != "int":
            raise pair.unfit(
                f"zero points {entry.name} {list(entry.shape)} do not match its scales"
            )
    group = around.config.group_of(pair.module)
    bits = group.bits_in_bytes if pair.kind is _INT8 else 8
    pair.require_settings(group, num_bits=bits, type=pair.values.dtype.kind)
    rows, recorded = shape[:-1], around.config.block_of(pair.module)
    blocks = _blocks(shape, recorded) if recorded else 1
    if pair.scales.elements == 1 != blocks:
        raise pair.unfit(
            f"{pair.scales.name} is one scale, but quantization_config says {blocks:,} blocks"
        )
    if pair.scales.elements == 1 or (rows and grid in (rows, (*rows, 1))):
        block = shape if pair.scales.elements == 1 else part_of_row(shape, shape[-1])
        pair.require_strategy(group, shape, block)
        scales, *zeros = (_with_dims(e, len(shape)) for e in (pair.scales, *pair.extras))
        pair = replace(pair, scales=scales, extras=tuple(zeros))
        return pair.numbers(compute_scaled, around.dtype, shape, block)
    block = (*(1 for _ in shape[2:]), *_sizes(pair, recorded))
    pair.require_strategy(group, shape, block)
    return pair.numbers(compute_scaled, around.dtype, shape, block)


def _sizes(pair: Quantized, recorded: tuple[int, int] | None) -> tuple[int, int]:
    """Return the size of the blocks of a matrix; Unsupported if it is not the recorded one."""
    shape, grid = pair.values.shape, pair.scales.shape
    if len(shape) != len(grid) or len(shape) < 2 or shape[:-2] != grid[:-2]:
        raise pair.unfit()
    for sizes in [recorded] if recorded else [_BLOCK, _divide(shape[-2:], grid[-2:])]:
        if sizes and tuple(-(-n // b) for n, b in zip(shape[-2:], sizes, strict=True)) == grid[-2:]:
            return sizes
    raise pair.unfit(
        f"scales {pair.scales.name} {list(grid)} do not match the blocks of {recorded[0]} x"
        f" {recorded[1]} that quantization_config says"
        if recorded
        else None
    )


def _blocks(shape: tuple[int, ...], sizes: tuple[int, int]) -> int:
    """Return how many blocks of a size a matrix has: the last two dims of ``shape``."""
    counts = (-(-n // size) for n, size in zip(shape[-2:], sizes, strict=False))
    return math.prod(counts) if len(shape) > 1 else 1


def _with_dims(entry: TensorEntry, count: int) -> TensorEntry:
    """Return a tensor with dims of one index added at the end."""
    while len(entry.shape) < count:
        entry = insert_dim(entry, len(entry.shape))
    return entry


def _divide(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the size of the blocks if they divide a tensor evenly.

    None if they are neither square, nor of one row, nor of whole columns or the whole matrix: such
    scales may be transposed.
    """
    if any(not count or size % count for size, count in zip(shape, grid, strict=True)):
        return None
    rows, columns = (size // count for size, count in zip(shape, grid, strict=True))
    is_whole = grid[0] == 1 and grid[1] in (1, shape[1])
    return (rows, columns) if rows in (1, columns) or is_whole else None


def _lay_out_groups(
    compute: ComputeByTorch, bits: int, pair: Quantized, around: Surroundings
) -> TensorEntry:
    """Lay out floats with a scale per group of a row: MX, or NVFP4 with a global scale, too."""
    pair.require_type(pair.scales, "float8_e4m3fn" if pair.extras else EXPONENTS)
    for global_scale in pair.extras:
        pair.require_type(global_scale, "float")
    shape = pair.unpacked_shape if bits == 4 else pair.values.shape
    size = _NV_GROUP if pair.extras else _MX_GROUP
    if (
        not shape
        or pair.scales.shape != (*shape[:-1], shape[-1] // size)
        or shape[-1] % size
        or any(entry.elements != 1 for entry in pair.extras)
    ):
        raise pair.unfit()
    group, block = around.config.group_of(pair.module), part_of_row(shape, size)
    pair.require_settings(group, num_bits=bits, type="float", group_size=size)
    pair.require_strategy(group, shape, block)
    return pair.numbers(compute, around.dtype, shape, block)


def compute_scaled(gather: Gather, at: Computed, box: Box, dtype: Any) -> Any:
    """Multiply values, less the integer zero points of blocks if there are any, by scales."""
    numbers = read_floats(gather, at.values, box)
    for zeros in at.extras:
        numbers = numbers - read_spread(gather, zeros, at.block, box)
    return (numbers * read_spread(gather, at.scales, at.block, box)).to(dtype)


def _compute_fp4(
    gather: Gather, at: Computed, box: Box, dtype: Any, *, divides: bool = True
) -> Any:
    """Multiply floats of four bits by scales of 8 bits and a global one, in 32 bits.

    A byte has two floats, the first in its lower half. The global scale ``divides`` the others
    (compressed-tensors) or multiplies them (ModelOpt); MXFP4 has none.
    """
    import torch

    # compressed-tensors keeps the sign of a zero, ModelOpt does not
    table = torch.tensor([*FP4, -0.0 if divides else 0.0, *(-n for n in FP4[1:])])
    numbers = table[read_codes(gather, at.values, box)]
    scales = read_floats(gather, at.scales, blocks_of(box, at.block))
    for entry in at.extras:
        global_scale = read_floats(gather, entry).reshape(())
        scales = scales / global_scale if divides else scales * global_scale
    return (numbers * spread(scales, at.block, box)).to(dtype)


_lay_out_fp4 = partial(_lay_out_groups, _compute_fp4, 4)
_lay_out_mxfp8 = partial(_lay_out_groups, compute_scaled, 8)

SCHEME = Scheme(
    find,
    (_PACKED, *_SCALES),
    (_FP8, _FP8_BLOCKS, _INT8, _MXFP8, MXFP4, _NVFP4),
    {"NVFP4": "weight_scale_2"},
)
