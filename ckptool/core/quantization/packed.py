"""Integers packed into 32-bit words: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import TensorEntry
from ckptool.core.quantization.config import Group
from ckptool.core.quantization.model import Quantized, Surroundings, Tensors
from ckptool.errors import Unsupported

_PACKED, _WORDS = ".weight_packed", ".qweight"
_BITS = (4, 8)
"""Widths that the tensors determine; others come from ``num_bits`` of quantization_config."""
_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_BITS = 4
_ADDED = {"gptq": 1.0, "gptq_v2": 0.0}
"""Added to a stored zero point: AutoGPTQ stores it less one, GPTQModel's v2 format does not."""
_REORDERED = ("true", "group", "dynamic")
"""compressed-tensors' (0.20) names for groups of columns in another order than stored."""
_OF_MODULES = ("dynamic", "extra_config")
"""The keys of GPTQModel and AutoRound for settings of single modules."""
_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
"""AutoRound's names for the layouts that it shares with others."""


def find_packed(tensors: Tensors) -> Iterator[Quantized]:
    """Yield integers in words, if all tensors that their numbers need exist.

    compressed-tensors: ``X.weight_packed`` with ``X.weight_scale`` and ``X.weight_shape``. GPTQ and
    AWQ: ``X.qweight`` with ``X.qzeros`` and ``X.scales``, GPTQ mostly with ``X.g_idx``.
    """
    for name, values in tensors.items():
        if values.dtype.name != "int32" or len(values.shape) < 2:
            continue
        if name.endswith(_PACKED):
            own = name.removesuffix("_packed")
            parts = ("scale", "shape", "zero_point", "g_idx")
            scales, sizes, *others = (tensors.get(f"{own}_{part}") for part in parts)
            if scales is not None and sizes is not None:
                there = tuple(entry for entry in others if entry is not None)
                yield Quantized(
                    "packed integers",
                    own,
                    values,
                    scales,
                    _lay_out_integers,
                    "packed",
                    there,
                    about=(sizes,),
                )
        elif name.endswith(_WORDS):
            yield from _of_words(tensors, values, name.removesuffix(_WORDS))


def _of_words(tensors: Tensors, values: TensorEntry, module: str) -> Iterator[Quantized]:
    """Yield GPTQ, packed along the inputs, or AWQ, along the outputs, by the scales' columns."""
    zeros, scales, order = (tensors.get(f"{module}.{p}") for p in ("qzeros", "scales", "g_idx"))
    if zeros is None or scales is None or len(scales.shape) != 2 or len(values.shape) != 2:
        return
    name = f"{module}.weight"
    if scales.shape[1] == values.shape[1]:
        others = (zeros,) if order is None else (zeros, order)
        yield Quantized("GPTQ", name, values, scales, _lay_out_gptq, "gptq", others)
    elif order is None:
        yield Quantized("AWQ", name, values, scales, _lay_out_awq, "awq", (zeros,))


def _lay_out_integers(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers that are packed in words, each row of a tensor by itself.

    The shape and the words of a row determine how many a word has.
    """
    pair.require_type(pair.scales, "float")
    shape = _shape(pair.about[0], around)
    words, grid = pair.values.shape, pair.scales.shape
    group = around.config.group_of(pair.module)
    said = group.weights
    asked = said.get("num_bits")
    may_be = (asked,) if type(asked) is int and 1 < asked < 8 and asked not in _BITS else _BITS
    fits = [n for n in may_be if shape and words == (*shape[:-1], -(-shape[-1] * n // 32))]
    if fits and 32 % fits[0] and 1 < words[-1] == -(-shape[-1] // (32 // fits[0])):
        raise pair.unfit("compressed-tensors before 0.13 has as many words, in another order")
    columns = grid[-1] if len(grid) == len(shape) and grid[:-1] == shape[:-1] else 0
    if len(fits) != 1 or not columns or shape[-1] % columns:
        raise pair.unfit()
    bits, block = fits[0], (*(1 for _ in shape[1:]), shape[-1] // columns)
    pair.require_said(group, num_bits=bits, group_size=block[-1], type="int")
    pair.require_strategy(group, shape, block)
    parts = {entry.name.removeprefix(f"{pair.name}_") for entry in pair.others}
    if said.get("symmetric") is False and "zero_point" not in parts:
        raise pair.unfit(f"{group} says symmetric False, but no {pair.name}_zero_point")
    if str(said.get("actorder")).lower() in _REORDERED and "g_idx" not in parts:
        raise pair.unfit(f"{group} says actorder {said['actorder']}, but no {pair.name}_g_idx")
    zeros = (*shape[:-2], -(-shape[-2] * bits // 32), columns) if len(shape) > 1 else ()
    for entry in pair.others:
        wanted = (shape[-1],) if entry.name.endswith("_g_idx") else zeros
        if entry.shape != wanted or entry.dtype.name != "int32":
            raise pair.unfit()
    return replace(pair, settings=(bits,)).numbers(around.dtype, shape, block)


def _shape(entry: TensorEntry, around: Surroundings) -> tuple[int, ...]:
    """Return the shape stored in a tensor; empty if there is none."""
    if entry.dtype.kind != "int" or len(entry.shape) != 1:
        return ()
    stored, size = around.read(entry), entry.dtype.itemsize
    starts = range(0, len(stored), size)
    return tuple(int.from_bytes(stored[at : at + size], "little", signed=True) for at in starts)


def _require_layout(pair: Quantized, method: str, config: Surroundings) -> str | None:
    """Return the config's name for the format of GPTQ or AWQ; Unsupported if it is another."""
    fields = config.config.fields
    said = config.config.method
    if said == "auto-round":
        said = _AUTO_ROUND.get(str(fields.get("packing_format")), said)
    if said not in (None, method):
        raise pair.unfit(
            f"quantization_config says {said}, but its tensors are named as {method}'s"
        )
    form = fields.get("checkpoint_format" if method == "gptq" else "version")
    return None if form is None else str(form).lower()


def _lay_out_gptq(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers packed along the inputs; ``qzeros`` along the outputs, less one in v1."""
    fields = around.config.fields
    if not fields:
        raise Unsupported(
            f"{pair.values.name}: GPTQ stores zero points in two ways, and config.json or"
            " quantize_config.json, which say which, were not found",
            hint="use --hf-assets FOLDER with the model's config.json",
        )
    form = _require_layout(pair, "gptq", around) or "gptq"
    if form not in _ADDED:
        raise pair.unfit(f"checkpoint_format {form} is not supported, only gptq and gptq_v2")
    pair.require_type(pair.scales, "float")
    (words, rows), groups = pair.values.shape, pair.scales.shape[0]
    zeros, *order = pair.others
    fits = [n for n in _GPTQ_BITS if zeros.shape == (groups, rows * n // 32) and not rows * n % 32]
    if len(fits) != 1 or zeros.dtype.name != "int32" or not groups or words * 32 % fits[0]:
        raise pair.unfit(f"scales {pair.scales.name} {list(pair.scales.shape)} do not match it")
    bits, columns = fits[0], words * 32 // fits[0]
    if any(o.shape != (columns,) or o.dtype.name not in ("int32", "int64") for o in order):
        raise pair.unfit(f"{order[0].name} {list(order[0].shape)} does not match its columns")
    said, own = fields.get("group_size"), _of_modules(fields)
    pair.require_said(Group(weights={} if own else fields), bits=bits)
    if fields.get("desc_act") is True and groups > 1 and not order:
        raise pair.unfit(f"quantization_config says desc_act, but no {pair.module}.g_idx")
    sizes = [said] if type(said) is int and said > 0 else []
    if sizes and not own and -(-columns // sizes[0]) != groups:
        raise pair.unfit(
            f"quantization_config says group_size {said}, the tensors {columns // groups}"
        )
    sizes += [columns // groups] if columns % groups == 0 else []
    may_be = dict.fromkeys(size for size in sizes if -(-columns // size) == groups)
    if not may_be:
        raise pair.unfit(f"scales {pair.scales.name} are of {groups} groups, not of {said} columns")
    group, *another = may_be
    if another and own and not order:
        raise pair.unfit(
            f"groups of {group} columns or of {another[0]}: quantization_config has settings of"
            f" some modules, and no {pair.module}.g_idx"
        )
    pair = replace(pair, settings=(bits, _ADDED[form]))
    return pair.numbers(around.dtype, (rows, columns), (1, group))


def _of_modules(fields: Mapping[str, Any]) -> bool:
    """Return whether some modules have settings of their own."""
    return any(fields.get(key) for key in _OF_MODULES)


def _lay_out_awq(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers of four bits packed along the outputs, as in AutoAWQ's GEMM."""
    form = _require_layout(pair, "awq", around) or "gemm"
    if form != "gemm":
        raise pair.unfit(f"AWQ of version {form} is not supported, only gemm")
    pair.require_type(pair.scales, "float")
    (columns, words), (groups, rows) = pair.values.shape, pair.scales.shape
    each = 32 // _AWQ_BITS
    if rows != words * each or pair.others[0].shape != (groups, words) or not groups:
        raise pair.unfit(f"scales {pair.scales.name} {list(pair.scales.shape)} do not match it")
    if columns % groups or pair.others[0].dtype.name != "int32":
        raise pair.unfit()
    fields = around.config.fields
    said = Group(weights={} if _of_modules(fields) else fields)
    pair.require_said(said, bits=_AWQ_BITS, group_size=columns // groups)
    pair = replace(pair, settings=(_AWQ_BITS,))
    return pair.numbers(around.dtype, (rows, columns), (1, columns // groups))
