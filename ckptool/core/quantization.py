"""Quantised tensors: find them by names and types, and dequantize those with known scales."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    ScaledBlocks,
    Scheme,
    StridedPart,
    TensorEntry,
)
from ckptool.core.dtype import DType
from ckptool.core.selection import renamed_path
from ckptool.core.views import insert_dim
from ckptool.errors import Unsupported

_SCALE, _BLOCKS, _SCALES, _ONE_SCALE = "_scale_inv", "_blocks", "_scales", ".weight_scale"
_PACKED_WEIGHT = ".weight_packed"
_BITS = (4, 8)
_BLOCK = (128, 128)
_KINDS = {
    "bitsandbytes, 4 bit": re.compile(r".*\.quant_state\.bitsandbytes__(nf4|fp4)"),
    "bitsandbytes, 8 bit": re.compile(r".*\.SCB"),
    "GPTQ": re.compile(r".*\.g_idx"),
    "compressed-tensors, packed": re.compile(r".*\.weight_packed"),
    "compressed-tensors, reordered": re.compile(r".*\.weight_g_idx"),
    "NVFP4": re.compile(r".*\.weight_scale_2"),
    "by torch (int_repr)": re.compile(r"(.*\.)?int_repr"),
    "HQQ": re.compile(r".*\.W_q"),
}
_DEEPEST = 3
_PACKED = re.compile(r"(.*)\.qweight")


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised tensor: what its kind and its numbers are called, and what they are made of.

    ``others`` are zero points or a scale of all; ``sizes`` is a tensor that holds the shape.
    """

    kind: str
    name: str
    values: TensorEntry
    scales: TensorEntry
    scheme: Scheme = "scaled"
    others: tuple[TensorEntry, ...] = ()
    sizes: TensorEntry | None = None

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """All the tensors in whose place the numbers come."""
        sizes = () if self.sizes is None else (self.sizes,)
        return (self.values, self.scales, *self.others, *sizes)


def pairs(catalog: Catalog) -> Iterator[Quantized]:
    """Yield the tensors that are stored with scales in a known way.

    DeepSeek-V3: ``X.weight`` in 8-bit floats and ``X.weight_scale_inv``. gpt-oss: ``X_blocks`` and
    ``X_scales`` in bytes. compressed-tensors, fbgemm and ModelOpt: ``X.weight`` in 8 bits and
    ``X.weight_scale``, one for the tensor or one for each row. compressed-tensors:
    ``X.weight_packed``. ModelOpt: ``X.weight`` in bytes with ``X.weight_scale_2``.
    """
    tensors = catalog.tensors
    for name, entry in tensors.items():
        if name.endswith(_SCALE):
            values = tensors.get(own := name.removesuffix(_SCALE))
            if values is not None and values.dtype.name.startswith("float8"):
                yield Quantized("FP8 in blocks", own, values, entry)
        elif name.endswith(_ONE_SCALE):
            values = tensors.get(own := name.removesuffix("_scale"))
            of_all = tensors.get(f"{name}_2")
            if values is not None and of_all is not None and values.dtype.name == "uint8":
                yield Quantized("NVFP4", own, values, entry, "nvfp4*", (of_all,))
            elif values is not None and _has_one_scale(values, entry):
                kind = "FP8" if values.dtype.kind == "float" else "INT8"
                yield Quantized(kind, own, values, entry)
        elif name.endswith(_SCALES) and entry.dtype.name == "uint8":
            values = tensors.get((own := name.removesuffix(_SCALES)) + _BLOCKS)
            if values is not None and values.dtype.name == "uint8":
                yield Quantized("MXFP4", own, values, entry, "mxfp4")
        elif name.endswith(_PACKED_WEIGHT):
            yield from _packed(tensors, entry)


def _packed(tensors: Mapping[str, TensorEntry], values: TensorEntry) -> Iterator[Quantized]:
    """Yield what compressed-tensors packed, where all is there that its numbers are made of."""
    own = values.name.removesuffix("_packed")
    parts = ("scale", "shape", "global_scale", "zero_point", "g_idx")
    scales, sizes, of_all, zeros, order = (tensors.get(f"{own}_{part}") for part in parts)
    if scales is None or order is not None:
        return
    if values.dtype.name == "uint8" and of_all is not None:
        yield Quantized("NVFP4", own, values, scales, "nvfp4/", (of_all,))
    elif values.dtype.name == "int32" and sizes is not None:
        others = () if zeros is None else (zeros,)
        yield Quantized("packed integers", own, values, scales, "int4", others, sizes)


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
    known = list(pairs(catalog))
    counts = Counter(pair.kind for pair in known)
    stored = {entry.name for pair in known for entry in pair.stored}
    for name in catalog.tensors.keys() - stored:
        counts.update(kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name))
        packed = _PACKED.fullmatch(name)
        if packed and f"{packed[1]}.g_idx" not in catalog.tensors:
            counts["AWQ"] += 1
    return dict(counts)


def quantised_names(catalog: Catalog) -> set[str]:
    """Return the names of quantised tensors and their scales, those of unsupported kinds too.

    Of a module that is quantised in another way than by pairs, that is all but its bias.
    """
    names = {entry.name for pair in pairs(catalog) for entry in pair.stored}
    patterns = (*_KINDS.values(), _PACKED)
    others = catalog.tensors.keys() - names
    marked = (n for n in others if any(pattern.fullmatch(n) for pattern in patterns))
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
    catalog: Catalog,
    dtype: DType,
    read_sizes: Callable[[TensorEntry], tuple[int, ...]],
    block: tuple[int, int] | None = None,
) -> DequantizeResult:
    """Put numbers of ``dtype`` in the place of values and scales.

    ``read_sizes`` reads the shape that a tensor holds; ``block`` is the size of an FP8 block where
    the model's config says it. Raises Unsupported where no tensor is quantised in a known way, and
    what ``read_sizes`` does.
    """
    by_values = {pair.values.name: pair for pair in pairs(catalog)}
    if not by_values:
        raise Unsupported(
            "--dequantize: no tensors with supported scales found",
            hint="supported: X.weight with X.weight_scale_inv or X.weight_scale, X_blocks with"
            " X_scales, X.weight_packed with X.weight_scale",
        )
    scales = {entry.name for pair in by_values.values() for entry in pair.stored[1:]}
    result = DequantizeResult(catalog, {}, {})
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        if name in scales:
            continue
        pair = by_values.get(name)
        if pair is not None:
            try:
                entry = _numbers(pair, dtype, read_sizes, block)
                result.kinds[id(entry.chunks)] = pair.kind
            except Unsupported as error:
                result.unfit[id(entry.chunks)] = error
        if entry.name in tensors:
            raise Unsupported(f"--dequantize: tensor {entry.name} already exists")
        tensors[entry.name] = entry
    return replace(result, catalog=catalog.with_tensors(tensors))


def _numbers(
    pair: Quantized,
    dtype: DType,
    read_sizes: Callable[[TensorEntry], tuple[int, ...]],
    block: tuple[int, int] | None,
) -> TensorEntry:
    _require_scale_types(pair)
    if pair.sizes is not None:
        return _integers(pair, dtype, read_sizes(pair.sizes))
    if pair.scheme == "mxfp4":
        return _four_bits(pair, dtype)
    if pair.scheme != "scaled":
        return _nvfp4(pair, dtype)
    return _blocks(pair, dtype, block) if pair.kind == "FP8 in blocks" else _rows(pair, dtype)


def _require_scale_types(pair: Quantized) -> None:
    """Raise Unsupported where scales are of a type that would be read as other numbers."""
    wanted = "float8_e4m3fn" if pair.scheme.startswith("nvfp4") else "float"
    of_all = pair.others if wanted == "float8_e4m3fn" else ()
    for entry, such in ((pair.scales, wanted), *((entry, "float") for entry in of_all)):
        if pair.scheme != "mxfp4" and such not in (entry.dtype.name, entry.dtype.kind):
            raise Unsupported(
                f"{pair.values.name}: scales {entry.name} are {entry.dtype.name}, not {such}",
                hint=f"use --drop '{pair.values.name}' to exclude it",
            )


def _integers(pair: Quantized, dtype: DType, shape: tuple[int, ...]) -> TensorEntry:
    """Lay out integers that are packed in words, the rows of a tensor of ``shape`` by themselves.

    A word holds as many as say the shape and the words of a row.
    """
    words, grid = pair.values.shape, pair.scales.shape
    fits = [n for n in _BITS if shape and words == (*shape[:-1], -(-shape[-1] * n // 32))]
    columns = grid[-1] if len(grid) == len(shape) and grid[:-1] == shape[:-1] else 0
    if len(fits) != 1 or not columns or shape[-1] % columns:
        raise _unfit(pair)
    bits = fits[0]
    zeros = (*shape[:-2], -(-shape[-2] * bits // 32), columns) if len(shape) > 1 else ()
    if any(entry.shape != zeros or entry.dtype.name != "int32" for entry in pair.others):
        raise _unfit(pair)
    scheme: Scheme = "int4" if bits == 4 else "int8"
    block = (*(1 for _ in shape[1:]), shape[-1] // columns)
    return _scaled_entry(replace(pair, scheme=scheme), dtype, shape, block)


def _nvfp4(pair: Quantized, dtype: DType) -> TensorEntry:
    """Lay out floats of four bits, two a byte, with a scale for so many of a row and one of all."""
    halves, grid = pair.values.shape, pair.scales.shape
    shape = (*halves[:-1], 2 * halves[-1]) if halves else ()
    columns = grid[-1] if len(grid) == len(shape) and grid[:-1] == shape[:-1] else 0
    if not columns or shape[-1] % columns or any(entry.elements != 1 for entry in pair.others):
        raise _unfit(pair)
    block = (*(1 for _ in shape[1:]), shape[-1] // columns)
    return _scaled_entry(pair, dtype, shape, block)


def _rows(pair: Quantized, dtype: DType) -> TensorEntry:
    """Lay out numbers with one scale, or one for each row."""
    shape, scales = pair.values.shape, pair.scales
    while len(scales.shape) < len(shape):
        scales = insert_dim(scales, len(scales.shape))
    block = shape if scales.elements == 1 else (*(1 for _ in shape[1:]), shape[-1])
    return _scaled_entry(replace(pair, scales=scales), dtype, shape, block)


def _blocks(pair: Quantized, dtype: DType, block: tuple[int, int] | None) -> TensorEntry:
    shape, grid = pair.values.shape, pair.scales.shape
    if len(shape) != len(grid) or len(shape) < 2 or shape[:-2] != grid[:-2]:
        raise _unfit(pair)
    for sizes in (block or _BLOCK, _even(shape[-2:], grid[-2:])):
        if sizes and tuple(-(-n // b) for n, b in zip(shape[-2:], sizes, strict=True)) == grid[-2:]:
            return _scaled_entry(pair, dtype, shape, (*(1 for _ in shape[2:]), *sizes))
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
    whole = (*grid[:-1], grid[-1] * size)
    return _scaled_entry(pair, dtype, whole, (*(1 for _ in grid[1:]), size))


def _unfit(pair: Quantized) -> Unsupported:
    return Unsupported(
        f"{pair.values.name} {list(pair.values.shape)}: scales {pair.scales.name}"
        f" {list(pair.scales.shape)} do not match its blocks",
        hint=f"use --drop '{pair.values.name}' to exclude it",
    )


def _scaled_entry(
    pair: Quantized, dtype: DType, shape: tuple[int, ...], block: tuple[int, ...]
) -> TensorEntry:
    whole = StridedPart(shape, 0, row_major_strides(shape, 1))
    at = ScaledBlocks(pair.values, pair.scales, block, whole, pair.scheme, pair.others)
    return replace(
        pair.values,
        name=pair.name,
        path=renamed_path(pair.values.path, pair.name),
        dtype=dtype,
        shape=shape,
        chunks=(Chunk(Box.whole(shape), at),),
        placements=None,
        mesh=None,
        stored=None,
    )
