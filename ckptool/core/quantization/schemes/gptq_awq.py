"""GPTQ and AWQ: ``X.qweight`` with ``X.qzeros`` and ``X.scales``, GPTQ mostly with ``X.g_idx``.

Integers packed into 32-bit words. AutoGPTQ (0.7) packs along the inputs, which are the columns of
the weight; AutoAWQ (0.2) along the outputs, its rows, in another order. Both store the weight
transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Computed, Gather, TensorEntry
from ckptool.core.quantization.blocks import read_floats, read_order, unpack
from ckptool.core.quantization.config import Group
from ckptool.core.quantization.model import Kind, Quantized, Scheme, Surroundings
from ckptool.errors import Damaged, Unsupported

_GPTQ, _AWQ = Kind("GPTQ", "auto-round gptq"), Kind("AWQ", "auto-round awq")
_WORDS = ".qweight"
_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_BITS = 4
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of AutoAWQ's eight 4-bit integers (``packing_utils``)."""
_ADDED = {"gptq": 1, "gptq_v2": 0}
"""Added to a stored zero point: AutoGPTQ stores it less one, GPTQModel's v2 format does not."""
_OF_MODULES = ("dynamic", "extra_config")
"""The keys of GPTQModel and AutoRound for settings of single modules."""
_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
"""AutoRound's names for the layouts that it shares with others."""


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield GPTQ, packed along the inputs, or AWQ, along the outputs, by the scales' columns."""
    tensors = catalog.tensors
    for name in names:
        values, module = tensors[name], name.removesuffix(_WORDS)
        zeros, scales, order = (tensors.get(f"{module}.{p}") for p in ("qzeros", "scales", "g_idx"))
        if zeros is None or scales is None or len(scales.shape) != 2:
            continue
        if values.dtype.name != "int32" or len(values.shape) != 2:
            continue
        weight = f"{module}.weight"
        if scales.shape[1] == values.shape[1]:
            extras = (zeros,) if order is None else (zeros, order)
            yield Quantized(_GPTQ, weight, values, scales, _lay_out_gptq, extras)
        elif order is None:
            yield Quantized(_AWQ, weight, values, scales, _lay_out_awq, (zeros,))


def _require_layout(pair: Quantized, method: str, around: Surroundings) -> str | None:
    """Return the config's name for the format of GPTQ or AWQ; Unsupported if it is another."""
    fields, recorded = around.config.fields, around.config.method
    if recorded == "auto-round":
        recorded = _AUTO_ROUND.get(str(fields.get("packing_format")), recorded)
    if recorded not in (None, method):
        raise pair.unfit(
            f"quantization_config says {recorded}, but its tensors are named as {method}'s"
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
    zeros, *order = pair.extras
    fits = [n for n in _GPTQ_BITS if zeros.shape == (groups, rows * n // 32) and not rows * n % 32]
    if len(fits) != 1 or zeros.dtype.name != "int32" or not groups or words * 32 % fits[0]:
        raise pair.unfit(f"scales {pair.scales.name} {list(pair.scales.shape)} do not match it")
    bits, columns = fits[0], words * 32 // fits[0]
    if any(o.shape != (columns,) or o.dtype.name not in ("int32", "int64") for o in order):
        raise pair.unfit(f"{order[0].name} {list(order[0].shape)} does not match its columns")
    pair.require_settings(_settings(fields), bits=bits)
    if fields.get("desc_act") is True and groups > 1 and not order:
        raise pair.unfit(f"quantization_config says desc_act, but no {pair.module}.g_idx")
    group = _group_size(pair, fields, columns)
    compute = partial(_compute, bits=bits, added=_ADDED[form])
    return pair.numbers(compute, around.dtype, (rows, columns), (1, group))


def _group_size(pair: Quantized, fields: Mapping[str, Any], columns: int) -> int:
    """Return how many columns a group of GPTQ has; Unsupported if none or several would fit."""
    recorded, is_mixed, groups = fields.get("group_size"), _is_mixed(fields), pair.scales.shape[0]
    sizes = [recorded] if type(recorded) is int and recorded > 0 else []
    if sizes and not is_mixed and -(-columns // sizes[0]) != groups:
        raise pair.unfit(
            f"quantization_config says group_size {recorded}, the tensors {columns // groups}"
        )
    sizes += [columns // groups] if columns % groups == 0 else []
    candidates = dict.fromkeys(size for size in sizes if -(-columns // size) == groups)
    if not candidates:
        raise pair.unfit(
            f"scales {pair.scales.name} are of {groups} groups, not of {recorded} columns"
        )
    group, *another = candidates
    if another and is_mixed and len(pair.extras) == 1:
        raise pair.unfit(
            f"groups of {group} columns or of {another[0]}: quantization_config has settings of"
            f" some modules, and no {pair.module}.g_idx"
        )
    return group


def _settings(fields: Mapping[str, Any]) -> Group:
    """Return what a config says of all modules; nothing if some have settings of their own."""
    return Group(weights={} if _is_mixed(fields) else fields)


def _is_mixed(fields: Mapping[str, Any]) -> bool:
    """Return whether some modules have settings of their own."""
    return any(fields.get(key) for key in _OF_MODULES)


def _lay_out_awq(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers of four bits packed along the outputs, as in AutoAWQ's GEMM."""
    form = _require_layout(pair, "awq", around) or "gemm"
    if form != "gemm":
        raise pair.unfit(f"AWQ of version {form} is not supported, only gemm")
    pair.require_type(pair.scales, "float")
    (columns, words), (groups, rows) = pair.values.shape, pair.scales.shape
    zeros = pair.extras[0]
    if rows != words * len(_AWQ_PLACES) or zeros.shape != (groups, words) or not groups:
        raise pair.unfit(f"scales {pair.scales.name} {list(pair.scales.shape)} do not match it")
    if columns % groups or zeros.dtype.name != "int32":
        raise pair.unfit()
    fields, group = around.config.fields, columns // groups
    pair.require_settings(_settings(fields), bits=_AWQ_BITS, group_size=group)
    compute = partial(_compute, bits=_AWQ_BITS, places=_AWQ_PLACES)
    return pair.numbers(compute, around.dtype, (rows, columns), (1, group))


def _compute(
    gather: Gather,
    at: Computed,
    box: Box,
    dtype: Any,
    *,
    bits: int,
    added: int = 0,
    places: tuple[int, ...] | None = None,
) -> Any:
    """Subtract zero points from integers of ``bits``, and multiply by scales, in 32 bits.

    All are transposed: a column has the scale of the group in ``g_idx``, or of its block.
    ``added`` is added to a stored zero point. With ``places`` in a word, values are packed as zero
    points are, along the rows. Raises Unsupported or Damaged for numbers without a meaning.
    """
    import torch

    zeros, *order = at.extras
    (first, start), (last, stop) = box.lo, box.hi
    stored, dim = Box((start, first), (stop, last)), 0 if places is None else 1
    numbers = unpack(gather, at.values, stored, dim, bits, places)
    column_groups = torch.arange(start, stop) // at.block[-1]
    if order:
        column_groups = _groups(gather, order[0], start, stop, at)
    low, high = int(column_groups.min()), int(column_groups.max()) + 1
    groups = Box((low, first), (high, last))
    points = unpack(gather, zeros, groups, 1, bits, places) + added
    if added and int(points.max()) >> bits:
        # AutoGPTQ (0.7) cuts the sum; GPTQModel carries into the next zero point
        raise Unsupported(
            f"{zeros.name}: a zero point of {(1 << bits) - 1}, which readers of GPTQ add one to in"
            " different ways",
            hint=f"use --drop '{zeros.name.removesuffix('.qzeros')}.*' to exclude it",
        )
    scales = read_floats(gather, at.scales, groups)
    result = (numbers - points[column_groups - low]).to(torch.float32) * scales[column_groups - low]
    return result.T.to(dtype)


def _groups(gather: Gather, order: TensorEntry, start: int, stop: int, at: Computed) -> Any:
    """Read the group of each column. Raises Damaged for a group number out of range."""
    groups, count = read_order(gather, order, start, stop), at.scales.shape[0]
    if bool(((groups < 0) | (groups >= count)).any()):
        raise Damaged(f"{order.name}: group number outside the {count:,} groups", tensor=order.name)
    return groups


SCHEME = Scheme(find, (_WORDS,), (_GPTQ, _AWQ), {"GPTQ": "g_idx"})
