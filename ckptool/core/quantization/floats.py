"""Floats of 8 and 4 bits, and integers of 8, with scales for a tensor, rows, groups or blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from ckptool.core.catalog import Scheme, TensorEntry
from ckptool.core.dtype import BY_NAME, EXPONENTS
from ckptool.core.quantization.model import Quantized, Surroundings, Tensors
from ckptool.core.views import insert_dim, permute

_INVERSE, _BLOCKS, _SCALES, _SCALE = "_scale_inv", "_blocks", "_scales", "_scale"
_MISTRAL = ".qscale_weight"
_PACKED = ".weight_packed"
_PLAIN_SCALE = ".scale"
_ENDS = (_INVERSE, _PLAIN_SCALE, _SCALE, _SCALES, _PACKED, _MISTRAL)
_MX_GROUP, _NV_GROUP = 32, 16
_BLOCK = (128, 128)
"""DeepSeek-V3's, if no config states another size."""


def find_floats(tensors: Tensors) -> Iterator[Quantized]:
    """Yield 8-bit numbers with scales, and floats of 4 bits.

    DeepSeek-V3: ``X.weight`` in 8-bit floats and ``X.weight_scale_inv``. compressed-tensors, fbgemm
    and ModelOpt: ``X.weight`` in 8 bits and ``X.weight_scale``, fbgemm also ``X`` and ``X_scale``
    of experts (transformers 5.23, Llama 4). Mistral: ``X.weight`` and ``X.qscale_weight``. gpt-oss:
    ``X_blocks`` and ``X_scales`` in bytes. NVFP4 of ModelOpt: ``X.weight`` in bytes with
    ``X.weight_scale_2``; of compressed-tensors: ``X.weight_packed`` in bytes with
    ``X.weight_global_scale``; without that one, and with scales in bytes, MXFP4. MXFP8:
    ``X.weight`` in 8-bit floats, scales in bytes.
    DeepSeek-V4: ``X.scale`` for ``X.weight_scale_inv``, in exponents; ``X.weight`` in int8 is two
    floats of four bits each, as transformers 5.23 reads them.
    """
    for name, entry in ((n, e) for n, e in tensors.items() if n.endswith(_ENDS)):
        if name.endswith((_INVERSE, _PLAIN_SCALE)):
            own = name.removesuffix(_INVERSE)
            own = own if own != name else f"{name.removesuffix(_PLAIN_SCALE)}.weight"
            values = tensors.get(own)
            if values is not None and values.dtype.name.startswith(("float8_e4", "float8_e5")):
                yield Quantized("FP8 in blocks", own, values, entry, _lay_out_scaled)
            elif (
                values is not None and values.dtype.name == "int8" and entry.dtype.name == EXPONENTS
            ):
                pairs = replace(values, dtype=BY_NAME["uint8"])
                yield Quantized("MXFP4", own, pairs, entry, _lay_out_nvfp4, "nvfp4/")
        elif name.endswith((_SCALE, _MISTRAL)):
            own = name.removesuffix(_SCALE)
            own = own if own != name else f"{name.removesuffix(_MISTRAL)}.weight"
            if (values := tensors.get(own)) is not None:
                yield from _of_scale(tensors, values, entry, own)
        elif name.endswith(_SCALES) and _is_mx(entry):
            values = tensors.get((own := name.removesuffix(_SCALES)) + _BLOCKS)
            if values is not None and values.dtype.name == "uint8":
                yield Quantized("MXFP4", own, values, entry, _lay_out_mxfp4, "mxfp4")
        elif name.endswith(_PACKED) and entry.dtype.name == "uint8":
            own = name.removesuffix("_packed")
            scales, of_all = tensors.get(f"{own}_scale"), tensors.get(f"{own}_global_scale")
            if scales is not None and of_all is not None:
                yield Quantized("NVFP4", own, entry, scales, _lay_out_nvfp4, "nvfp4/", (of_all,))
            elif scales is not None and _is_mx(scales) and f"{own}_shape" not in tensors:
                yield Quantized("MXFP4", own, entry, _powers(scales), _lay_out_nvfp4, "nvfp4/")


def _of_scale(
    tensors: Tensors, values: TensorEntry, scales: TensorEntry, name: str
) -> Iterator[Quantized]:
    """Yield the quantized tensor of a weight and its scale."""
    of_all = tensors.get(f"{scales.name}_2")
    kind = values.dtype.name
    if of_all is not None and kind == "uint8":
        yield Quantized("NVFP4", name, values, scales, _lay_out_nvfp4, "nvfp4*", (of_all,))
    elif kind.startswith(("float8_e4", "float8_e5")) and _is_mx(scales):
        yield Quantized("MXFP8", name, values, _powers(scales), _lay_out_mxfp8)
    elif kind.startswith(("float8_e4", "float8_e5")) or kind == "int8":
        zeros = tensors.get(f"{name}_zero_point")
        order = tensors.get(f"{name}_g_idx")
        kind = "INT8" if kind == "int8" else "FP8"
        if order is None and values.shape:
            scheme: Scheme = "scaled" if zeros is None else "affine"
            others = () if zeros is None else (zeros,)
            yield Quantized(kind, name, values, scales, _lay_out_scaled, scheme, others)


def _is_mx(scales: TensorEntry) -> bool:
    """Return whether scales are power-of-two exponents, in bytes."""
    return scales.dtype.name in ("uint8", EXPONENTS)


def _powers(scales: TensorEntry) -> TensorEntry:
    """Return bytes that are power-of-two exponents with their real type."""
    return replace(scales, dtype=BY_NAME[EXPONENTS])


def _lay_out_mxfp8(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out floats of eight bits with one exponent per 32 of a row."""
    shape = pair.values.shape
    if (
        not shape
        or pair.scales.shape != (*shape[:-1], shape[-1] // _MX_GROUP)
        or shape[-1] % _MX_GROUP
    ):
        raise pair.unfit()
    said, block = around.config.group_of(pair.module), (*(1 for _ in shape[1:]), _MX_GROUP)
    pair.require_said(said, num_bits=8, type="float", group_size=_MX_GROUP)
    pair.require_strategy(said, shape, block)
    return pair.numbers(around.dtype, shape, block)


def _lay_out_scaled(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out numbers with one scale for all, per row, per group of a row, or per block."""
    pair.require_type(pair.scales, "float")
    shape, grid = pair.values.shape, pair.scales.shape
    for entry in pair.others:
        if entry.shape != grid or entry.dtype.kind != "int":
            raise pair.unfit(
                f"zero points {entry.name} {list(entry.shape)} do not match its scales"
            )
    group = around.config.group_of(pair.module)
    bits = group.bits_in_bytes if pair.kind == "INT8" else 8
    pair.require_said(group, num_bits=bits, type=pair.values.dtype.kind)
    rows, said = shape[:-1], around.config.block_of(pair.module)
    blocks = _blocks(shape, said) if said else 1
    if pair.scales.elements == 1 != blocks:
        raise pair.unfit(
            f"{pair.scales.name} is one scale, but quantization_config says {blocks:,} blocks"
        )
    if pair.scales.elements == 1 or (rows and grid in (rows, (*rows, 1))):
        block = shape if pair.scales.elements == 1 else (*(1 for _ in shape[1:]), shape[-1])
        pair.require_strategy(group, shape, block)
        scales, *others = (_with_dims(e, len(shape)) for e in (pair.scales, *pair.others))
        pair = replace(pair, scales=scales, others=tuple(others))
        return pair.numbers(around.dtype, shape, block)
    block = (*(1 for _ in shape[2:]), *_sizes(pair, said))
    pair.require_strategy(group, shape, block)
    return pair.numbers(around.dtype, shape, block)


def _sizes(pair: Quantized, said: tuple[int, int] | None) -> tuple[int, int]:
    """Return the size of the blocks of a matrix; Unsupported if it is not the one that is said."""
    shape, grid = pair.values.shape, pair.scales.shape
    if len(shape) != len(grid) or len(shape) < 2 or shape[:-2] != grid[:-2]:
        raise pair.unfit()
    for sizes in [said] if said else [_BLOCK, _even(shape[-2:], grid[-2:])]:
        if sizes and tuple(-(-n // b) for n, b in zip(shape[-2:], sizes, strict=True)) == grid[-2:]:
            return sizes
    raise pair.unfit(
        f"scales {pair.scales.name} {list(grid)} do not match the blocks of {said[0]} x {said[1]}"
        " that quantization_config says"
        if said
        else None
    )


def _blocks(shape: tuple[int, ...], sizes: tuple[int, int]) -> int:
    """Return how many blocks of a size a matrix has, the last two dims of a tensor of several."""
    counts = (-(-n // size) for n, size in zip(shape[-2:], sizes, strict=False))
    return math.prod(counts) if len(shape) > 1 else 1


def _with_dims(entry: TensorEntry, count: int) -> TensorEntry:
    """Return a tensor with dims of one index added at the end."""
    while len(entry.shape) < count:
        entry = insert_dim(entry, len(entry.shape))
    return entry


def _even(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the size of the blocks if they divide a tensor evenly.

    None if they are neither square, nor of one row, nor of whole columns or the whole matrix: such
    scales may be transposed.
    """
    if any(not count or size % count for size, count in zip(shape, grid, strict=True)):
        return None
    rows, columns = (size // count for size, count in zip(shape, grid, strict=True))
    is_whole = grid[0] == 1 and grid[1] in (1, shape[1])
    return (rows, columns) if rows in (1, columns) or is_whole else None


def _lay_out_nvfp4(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out floats of four bits, two per byte, with a scale per group of a row and one of all."""
    pair.require_type(pair.scales, "float8_e4m3fn" if pair.others else EXPONENTS)
    for of_all in pair.others:
        pair.require_type(of_all, "float")
    halves, grid = pair.values.shape, pair.scales.shape
    shape = (*halves[:-1], 2 * halves[-1]) if halves else ()
    columns = grid[-1] if len(grid) == len(shape) and grid[:-1] == shape[:-1] else 0
    if not columns or shape[-1] % columns or any(entry.elements != 1 for entry in pair.others):
        raise pair.unfit()
    block = (*(1 for _ in shape[1:]), shape[-1] // columns)
    if block[-1] != (_NV_GROUP if pair.others else _MX_GROUP):
        raise pair.unfit()
    said = around.config.group_of(pair.module)
    pair.require_said(said, num_bits=4, type="float", group_size=block[-1])
    pair.require_strategy(said, shape, block)
    return pair.numbers(around.dtype, shape, block)


def _lay_out_mxfp4(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out gpt-oss's experts as transformers (5.23, mxfp4.py) has them: inputs first.

    Rows of outputs are stored; models and files without quantization have them as columns.
    """
    shape, grid = pair.values.shape, pair.scales.shape
    if not grid or shape[:-1] != grid or not shape[-1]:
        raise pair.unfit()
    size = 2 * shape[-1]
    whole = (*grid[:-1], grid[-1] * size)
    rows = pair.numbers(around.dtype, whole, (*(1 for _ in grid[1:]), size))
    return permute(rows, (0, 2, 1)) if len(whole) == 3 else rows
