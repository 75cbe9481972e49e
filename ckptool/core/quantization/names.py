"""Which tensors of a catalog are quantized, and of what kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.quantization.bitsandbytes import find_bitsandbytes, find_packed_codes
from ckptool.core.quantization.comfy import find_comfy
from ckptool.core.quantization.floats import find_floats
from ckptool.core.quantization.model import Quantized
from ckptool.core.quantization.packed import find_packed
from ckptool.core.quantization.scale_names import Scales, is_weight
from ckptool.core.quantization.torchao import find_torchao
from ckptool.errors import Unsupported

_KINDS = {
    "bitsandbytes, 4 bit": re.compile(r".*\.quant_state\.bitsandbytes__\w+"),
    "bitsandbytes, 8 bit": re.compile(r".*\.SCB"),
    "GPTQ": re.compile(r".*\.g_idx"),
    "compressed-tensors, packed": re.compile(r".*\.weight_packed"),
    "compressed-tensors, reordered": re.compile(r".*\.weight_g_idx"),
    "NVFP4": re.compile(r".*\.weight_scale_2"),
    "by torch (int_repr)": re.compile(r"(.*\.)?int_repr"),
    "HQQ": re.compile(r".*\.W_q"),
    "NF4 by torchao": re.compile(r".*\.quantized_scalers"),
    "torchao": re.compile(r".*\.(qdata|_\w+_qdata|tensor_impl\..+)"),
    "ComfyUI": re.compile(r".*\.comfy_quant"),
}
"""Name patterns of quantized tensors that are incomplete, or of another kind."""
_WORDS = re.compile(r"(.*)\.qweight")
_MARKED = re.compile(
    "quant_state|SCB|g_idx|_packed|_scale_2|int_repr|W_q|qdata|tensor_impl|qweight|comfy_quant"
    "|scale_weight|scaled_fp8|quantized_scalers"
)
"""A text that each of these names contains somewhere, and few others do."""
_COARSE = re.compile(r"(float8_e[45].*|float4.*|u?int[1-8])")
_WORDY = re.compile(r"u?int(16|32)")
_SCALE = re.compile(r".*\.(weight|input|output|q|k|v|kv)_scale(_inv)?")
"""A scale of a weight, an activation or a KV cache (compressed-tensors, ModelOpt, AutoFP8)."""
_DEEPEST = 3


def pairs(catalog: Catalog) -> Iterator[Quantized]:
    """Yield the tensors with a supported quantization, with everything their numbers need."""
    yield from _pairs(catalog, _marked(catalog))


def _pairs(catalog: Catalog, marked: list[str]) -> Iterator[Quantized]:
    by_marker = list(find_comfy(catalog, marked))
    yield from by_marker
    known = {pair.values.name for pair in by_marker}
    yield from (pair for pair in find_floats(catalog.tensors) if pair.values.name not in known)
    yield from find_packed(catalog.tensors)
    yield from find_bitsandbytes(catalog.tensors, marked)
    yield from find_torchao(catalog, marked)


def _marked(catalog: Catalog) -> list[str]:
    """Return the names whose text allows that they belong to quantized tensors: few of all."""
    return [name for name in catalog.tensors if _MARKED.search(name)]


def kinds(catalog: Catalog) -> dict[str, int]:
    """Count the quantized tensors of each kind, by names and types."""
    marked = _marked(catalog)
    known = list(_pairs(catalog, marked))
    counts = Counter(pair.kind for pair in known)
    stored = {entry.name for pair in known for entry in pair.stored}
    counts.update(kind for name in marked if name not in stored if (kind := _kind(catalog, name)))
    return dict(counts)


def _kind(catalog: Catalog, name: str) -> str | None:
    """Return the kind that a name alone determines; None for all others."""
    if not _MARKED.search(name):
        return None
    for kind, pattern in _KINDS.items():
        if pattern.fullmatch(name):
            return kind
    packed = _WORDS.fullmatch(name)
    is_awq = packed and f"{packed[1]}.g_idx" not in catalog.tensors
    return "AWQ" if is_awq else None


def is_plain(catalog: Catalog) -> bool:
    """Return whether nothing can be quantized: nothing has few bits, or packed words, or a mark.

    The longest integers are no such words: some models have tables of them (DeepSeek V4). Nor is
    there a scale, as of a KV cache beside weights in full.
    """
    types = {entry.dtype.name for entry in catalog.tensors.values() if entry.shape}
    if any(_COARSE.fullmatch(name) or _WORDY.fullmatch(name) for name in types):
        return False
    names = catalog.tensors
    return not any("_scale" in name and _SCALE.fullmatch(name) for name in names) and not any(
        _kind(catalog, name) for name in _marked(catalog)
    )


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
        scale = scales.of(name) if _has_few_bits(entry) else None
        is_flat = len(entry.shape) == 1 and is_weight(name) and scale is not None
        if not is_packed(entry) and not is_flat:
            return None
        kind = f"{dtype} without scales" if scale is None else f"{dtype} with {scale}"
        left_out = name
    return Unsupported(
        f"{name}: {kind}, which --dequantize does not support",
        hint=f"use --drop '{left_out}' to exclude it",
    )


def is_packed(entry: TensorEntry) -> bool:
    """Return whether a tensor of at least two dims may be of packed elements, or need scales."""
    is_mask = entry.dtype.name == "uint8" and entry.name.endswith(".bias")
    return _has_few_bits(entry) and len(entry.shape) > 1 and not is_mask


def _has_few_bits(entry: TensorEntry) -> bool:
    name = entry.dtype.name
    return _COARSE.fullmatch(name) is not None or _WORDY.fullmatch(name) is not None


def packed_names(catalog: Catalog) -> set[str]:
    """Return the tensors whose elements are no numbers of their type, but packed bits."""
    return find_packed_codes(catalog.tensors, _marked(catalog))


def quantized_names(catalog: Catalog) -> set[str]:
    """Return the names of quantized tensors and their scales, those of unsupported kinds too.

    Of a module that is quantized in another way than by pairs, that is all but its bias.
    """
    names = {entry.name for pair in pairs(catalog) for entry in pair.stored}
    marked = (name for name in catalog.tensors.keys() - names if _kind(catalog, name))
    modules = {_module(name) for name in marked} - {""}
    if not modules:
        return names
    return names | {
        name
        for name in catalog.tensors
        if not name.endswith(".bias") and not modules.isdisjoint(_parents(name))
    }


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
