"""Quantised tensors: find them by names and types, and dequantize those with known scales."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, ScaledBlocks, StridedPart, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.selection import renamed_path
from ckptool.core.views import insert_dim
from ckptool.errors import Unsupported

_SCALE, _BLOCKS, _SCALES, _ONE_SCALE = "_scale_inv", "_blocks", "_scales", ".weight_scale"
_BLOCK = (128, 128)
_KINDS = {
    "bitsandbytes, 4 bit": re.compile(r".*\.quant_state\.bitsandbytes__(nf4|fp4)"),
    "bitsandbytes, 8 bit": re.compile(r".*\.SCB"),
    "GPTQ": re.compile(r".*\.g_idx"),
    "compressed-tensors, packed": re.compile(r".*\.weight_packed"),
    "NVFP4": re.compile(r".*\.weight_scale_2"),
    "by torch (int_repr)": re.compile(r"(.*\.)?int_repr"),
    "HQQ": re.compile(r".*\.W_q"),
}
_DEEPEST = 3
_PACKED = re.compile(r"(.*)\.qweight")


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised tensor, the scales of its blocks, and what its kind is called."""

    kind: str
    values: TensorEntry
    scales: TensorEntry


def pairs(catalog: Catalog) -> Iterator[Quantized]:
    """Yield the tensors that are stored with scales in a known way.

    DeepSeek-V3: ``X.weight`` in 8-bit floats and ``X.weight_scale_inv``. gpt-oss: ``X_blocks`` and
    ``X_scales`` in bytes. compressed-tensors, fbgemm and ModelOpt: ``X.weight`` in 8 bits and
    ``X.weight_scale``, one for the tensor or one for each row.
    """
    for name, scales in catalog.tensors.items():
        if name.endswith(_SCALE):
            values = catalog.tensors.get(name.removesuffix(_SCALE))
            if values is not None and values.dtype.name.startswith("float8"):
                yield Quantized("FP8 in blocks", values, scales)
        elif name.endswith(_ONE_SCALE):
            values = catalog.tensors.get(name.removesuffix("_scale"))
            if values is not None and _has_one_scale(values, scales):
                yield Quantized("FP8" if values.dtype.kind == "float" else "INT8", values, scales)
        elif name.endswith(_SCALES) and scales.dtype.name == "uint8":
            values = catalog.tensors.get(name.removesuffix(_SCALES) + _BLOCKS)
            if values is not None and values.dtype.name == "uint8":
                yield Quantized("MXFP4", values, scales)


def _has_one_scale(values: TensorEntry, scales: TensorEntry) -> bool:
    """Return whether 8-bit numbers have one scale, or one for each row."""
    rows = values.shape[:-1]
    fits = scales.elements == 1 or scales.shape in (rows, (*rows, 1))
    eight_bits = (
        values.dtype.name.startswith(("float8_e4", "float8_e5")) or values.dtype.name == "int8"
    )
    return fits and eight_bits and bool(rows) and scales.dtype.kind == "float"


def kinds(catalog: Catalog) -> dict[str, int]:
    """Count the quantised tensors of each kind that names and types tell."""
    counts = Counter(pair.kind for pair in pairs(catalog))
    for name in catalog.tensors:
        counts.update(kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name))
        packed = _PACKED.fullmatch(name)
        if packed and f"{packed[1]}.g_idx" not in catalog.tensors:
            counts["AWQ"] += 1
    return dict(counts)


def quantised_names(catalog: Catalog) -> set[str]:
    """Return the names of quantised tensors and their scales, those of unsupported kinds too.

    Of a module that is quantised in another way than by pairs, that is all but its bias.
    """
    names = {entry.name for pair in pairs(catalog) for entry in (pair.values, pair.scales)}
    patterns = (*_KINDS.values(), _PACKED)
    marked = (n for n in catalog.tensors if any(pattern.fullmatch(n) for pattern in patterns))
    modules = {_module(name) for name in marked} - {""}
    if not modules:
        return names
    return names | {
        name
        for name in catalog.tensors
        if not name.endswith(".bias") and not modules.isdisjoint(_parents(name))
    }


def _module(name: str) -> str:
    """Return the module that a name of a quantised tensor belongs to."""
    head, state, _ = name.partition(".weight.quant_state.")
    return head if state else name.rpartition(".")[0]


def _parents(name: str) -> Iterator[str]:
    """Yield the names that a name lies in, from the nearest."""
    for _ in range(_DEEPEST):
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, slots=True)
class DequantizeResult:
    """A catalog with numbers in the place of values and scales.

    ``kinds`` are those of the dequantized tensors, ``unfit`` why values whose scales do not fit are
    none of them: both by the identity of the entry's chunks, which selecting and renaming
    leave as it is.
    """

    catalog: Catalog
    kinds: dict[int, str]
    unfit: dict[int, Unsupported]

    def counts(self, kept: Catalog) -> dict[str, int]:
        """Count those of each kind that a selection keeps; Unsupported where one is unfit."""
        identities = [id(entry.chunks) for entry in kept.tensors.values()]
        for identity in identities:
            if identity in self.unfit:
                raise self.unfit[identity]
        return dict(Counter(self.kinds[i] for i in identities if i in self.kinds))


def dequantize(
    catalog: Catalog, dtype: DType, block: tuple[int, int] | None = None
) -> DequantizeResult:
    """Put numbers of ``dtype`` in the place of values and scales.

    ``block`` is the size of an FP8 block where the model's config says it. Raises Unsupported where
    no tensor is quantised in a known way.
    """
    by_values = {pair.values.name: pair for pair in pairs(catalog)}
    if not by_values:
        raise Unsupported(
            "--dequantize: no tensors with supported scales found",
            hint="supported: X.weight with X.weight_scale_inv or X.weight_scale, and X_blocks with"
            " X_scales",
        )
    scales = {pair.scales.name for pair in by_values.values()}
    result = DequantizeResult(catalog, {}, {})
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        if name in scales:
            continue
        pair = by_values.get(name)
        if pair is not None:
            try:
                entry = _numbers(pair, dtype, block)
                result.kinds[id(entry.chunks)] = pair.kind
            except Unsupported as error:
                result.unfit[id(entry.chunks)] = error
        if entry.name in tensors:
            raise Unsupported(f"--dequantize: tensor {entry.name} already exists")
        tensors[entry.name] = entry
    return replace(result, catalog=catalog.with_tensors(tensors))


def _numbers(pair: Quantized, dtype: DType, block: tuple[int, int] | None) -> TensorEntry:
    if pair.kind == "MXFP4":
        return _four_bits(pair, dtype)
    return _blocks(pair, dtype, block) if pair.kind == "FP8 in blocks" else _rows(pair, dtype)


def _rows(pair: Quantized, dtype: DType) -> TensorEntry:
    """Lay out numbers with one scale, or one for each row."""
    shape, scales = pair.values.shape, pair.scales
    while len(scales.shape) < len(shape):
        scales = insert_dim(scales, len(scales.shape))
    block = shape if scales.elements == 1 else (*(1 for _ in shape[1:]), shape[-1])
    return _scaled_entry(replace(pair, scales=scales), pair.values.name, dtype, shape, block)


def _blocks(pair: Quantized, dtype: DType, block: tuple[int, int] | None) -> TensorEntry:
    shape, grid = pair.values.shape, pair.scales.shape
    if len(shape) != len(grid) or len(shape) < 2 or shape[:-2] != grid[:-2]:
        raise _unfit(pair)
    for sizes in (block or _BLOCK, _even(shape[-2:], grid[-2:])):
        if sizes and tuple(-(-n // b) for n, b in zip(shape[-2:], sizes, strict=True)) == grid[-2:]:
            return _scaled_entry(
                pair, pair.values.name, dtype, shape, (*(1 for _ in shape[2:]), *sizes)
            )
    raise _unfit(pair)


def _even(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the size of the blocks where they divide a tensor without a rest."""
    if any(not count or size % count for size, count in zip(shape, grid, strict=True)):
        return None
    return tuple(size // count for size, count in zip(shape, grid, strict=True))


def _four_bits(pair: Quantized, dtype: DType) -> TensorEntry:
    shape, grid = pair.values.shape, pair.scales.shape
    if not grid or shape[:-1] != grid or not shape[-1]:
        raise _unfit(pair)
    size = 2 * shape[-1]
    name = pair.values.name.removesuffix(_BLOCKS)
    whole = (*grid[:-1], grid[-1] * size)
    return _scaled_entry(pair, name, dtype, whole, (*(1 for _ in grid[1:]), size))


def _unfit(pair: Quantized) -> Unsupported:
    return Unsupported(
        f"{pair.values.name} {list(pair.values.shape)}: scales {pair.scales.name}"
        f" {list(pair.scales.shape)} do not match its blocks",
        hint=f"use --drop '{pair.values.name}' to exclude it",
    )


def _scaled_entry(
    pair: Quantized, name: str, dtype: DType, shape: tuple[int, ...], block: tuple[int, ...]
) -> TensorEntry:
    whole = StridedPart(shape, 0, row_major_strides(shape, 1))
    at = ScaledBlocks(pair.values, pair.scales, block, whole)
    return replace(
        pair.values,
        name=name,
        path=renamed_path(pair.values.path, name),
        dtype=dtype,
        shape=shape,
        chunks=(Chunk(Box.whole(shape), at),),
        placements=None,
        mesh=None,
        stored=None,
    )
