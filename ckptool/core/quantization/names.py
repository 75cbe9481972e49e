"""Which tensors of a catalog are quantized, and of what kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.model import Quantized
from ckptool.core.quantization.scale_names import Scales, is_weight
from ckptool.core.quantization.schemes import SCHEMES
from ckptool.core.quantization.schemes.bitsandbytes import find_packed_codes
from ckptool.errors import Unsupported

_BY_TORCH = "by torch (int_repr)"
_UNSUPPORTED = {"HQQ": "W_q", "NF4 by torchao": "quantized_scalers", _BY_TORCH: "int_repr"}
"""Ends of names that tell a kind of no scheme here."""
_WORDS = ".qweight"
_ENDS = tuple(end for scheme in SCHEMES for end in scheme.ends)
_FEW_BITS = frozenset(
    dtype
    for dtype in BY_NAME.values()
    if dtype.is_float8 or dtype.packed == 2 or (dtype.kind == "int" and dtype.itemsize < 8)
)
"""Types of codes: the longest integers are none, some models have tables of them (DeepSeek V4)."""
_SCALE = re.compile(r".*\.(weight|input|output|q|k|v|kv)_scale(_inv)?")
"""A scale of a weight, an activation or a KV cache (compressed-tensors, ModelOpt, AutoFP8)."""
_DEEPEST = 3
"""Steps below its module of the deepest part: ``X.weight.quant_state.bitsandbytes__nf4``."""


@cache
def _marks() -> tuple[re.Pattern[str], list[str]]:
    """Return a pattern of the names that tell a kind, and the kind of each of its groups."""
    marks = {kind: mark for scheme in SCHEMES for kind, mark in scheme.marks.items()}
    marks |= _UNSUPPORTED
    ends = "|".join(f"({mark})" for mark in marks.values())
    return re.compile(rf".*\.(?:{ends})|int_repr"), [*marks]


def pairs(catalog: Catalog) -> Iterator[Quantized]:
    """Yield the tensors with a supported quantization, with everything their numbers need."""
    names = [name for name in catalog.tensors if name.endswith(_ENDS)]
    first, *rest = SCHEMES
    marked = _filter_ends(names, first.ends)
    has_markers = marked or catalog.metadata
    quantized = first.find(catalog, marked) if has_markers else ()
    by_marker = {pair.values.name: pair for pair in quantized}
    yield from by_marker.values()
    for scheme in rest:
        if candidates := _filter_ends(names, scheme.ends) or _filter_type(catalog, scheme.dtype):
            quantized = scheme.find(catalog, candidates)
            yield from (pair for pair in quantized if pair.values.name not in by_marker)


def _filter_ends(names: list[str], ends: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.endswith(ends)]


def _filter_type(catalog: Catalog, dtype: str) -> list[str]:
    tensors = catalog.tensors.items() if dtype else ()
    return [name for name, entry in tensors if entry.dtype.name == dtype]


def kinds(catalog: Catalog) -> dict[str, int]:
    """Count the quantized tensors of each kind, by names and types."""
    quantized = list(pairs(catalog))
    counts = Counter(pair.kind.name for pair in quantized)
    stored = {entry.name for pair in quantized for entry in pair.stored}
    counts.update(kind for name, kind in _find_kinds(catalog) if name not in stored)
    return dict(counts)


def _find_kinds(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield the names that tell a kind, each with the kind."""
    for name in catalog.tensors:
        if kind := _kind(catalog, name):
            yield name, kind


def _kind(catalog: Catalog, name: str) -> str | None:
    """Return the kind that a name alone determines; None if it determines none."""
    pattern, names = _marks()
    if match := pattern.fullmatch(name):
        return names[match.lastindex - 1] if match.lastindex else _BY_TORCH
    is_awq = name.endswith(_WORDS) and f"{name.removesuffix(_WORDS)}.g_idx" not in catalog.tensors
    return "AWQ" if is_awq else None


def is_plain(catalog: Catalog) -> bool:
    """Return whether no tensor can be quantized: none has few bits, a mark or a scale.

    A scale may be that of a KV cache, beside weights in full.
    """
    if any(entry.dtype in _FEW_BITS for entry in catalog.tensors.values() if entry.shape):
        return False
    if any("_scale" in name and _SCALE.fullmatch(name) for name in catalog.tensors):
        return False
    return next(_find_kinds(catalog), None) is None


def unknown_kind(catalog: Catalog, entry: TensorEntry, scales: Scales) -> Unsupported | None:
    """Return why a tensor that stays quantized is not dequantized; None for all others.

    Includes matrices of integers of 32 bits and less, and of floats of 8 and less: without scales
    they are no numbers that a model was trained with. A bias of bytes is not: GPT-2 and GPT-NeoX of
    transformers (up to 4.27) store their causal masks that way. Nor is a vector, but a weight with
    a scale.
    """
    name, dtype = entry.name, entry.dtype
    kind, left_out = _kind(catalog, name), f"{name.rpartition('.')[0]}.*"
    if kind is None:
        scale = scales.of(name) if dtype in _FEW_BITS else None
        is_flat = len(entry.shape) == 1 and is_weight(name) and scale is not None
        if not is_packed(entry) and not is_flat:
            return None
        kind = f"{dtype} without scales" if scale is None else f"{dtype} with {scale}"
        left_out = name
    return Unsupported(
        f"{name}: {kind}, which --dequantize does not support",
        hint=f"what quantized it can save it in full; --drop '{left_out}' leaves it out",
    )


def is_packed(entry: TensorEntry) -> bool:
    """Return whether a tensor of at least two dims may be of packed elements, or need scales."""
    is_mask = entry.dtype.name == "uint8" and entry.name.endswith(".bias")
    return entry.dtype in _FEW_BITS and len(entry.shape) > 1 and not is_mask


def packed_names(catalog: Catalog) -> set[str]:
    """Return the tensors whose elements are no numbers of their type, but packed bits."""
    return find_packed_codes(catalog)


def quantized_names(catalog: Catalog) -> set[str]:
    """Return the names of quantized tensors and their scales, of unsupported kinds, too.

    Of a module that is quantized in another way than by pairs, that is all but its bias.
    """
    return set[str]().union(*quantized_groups(catalog))


def quantized_groups(catalog: Catalog) -> list[set[str]]:
    """Return the quantized tensors, each as the names of the tensors that make its numbers."""
    groups = [{entry.name for entry in pair.stored} for pair in pairs(catalog)]
    names = set[str]().union(*groups)
    modules = {_module(name) for name, _ in _find_kinds(catalog) if name not in names} - {""}
    if not modules:
        return groups
    by_module: dict[str, set[str]] = {module: set() for module in modules}
    for name in catalog.tensors:
        for parent in _parents(name) if not name.endswith(".bias") else ():
            if parent in modules:
                by_module[parent].add(name)
    return [*groups, *by_module.values()]


def dequantizing_hint(catalog: Catalog, unmatched: Collection[str]) -> str | None:
    """Return the hint that a key map lacks rules for quantized tensors; None if there are none."""
    if quantized_names(catalog).isdisjoint(unmatched):
        return None
    return "use --dequantize: key maps do not apply to quantized tensors"


def _module(name: str) -> str:
    """Return the module that a name of a quantized tensor belongs to."""
    head, state, _ = name.partition(".weight.quant_state.")
    return head if state else name.rpartition(".")[0]


def _parents(name: str) -> Iterator[str]:
    """Yield the names that a name lies in, from the nearest."""
    for _ in range(_DEEPEST):
        name = name.rpartition(".")[0]
        yield name
