"""ComfyUI's quantized weights: FP8, MXFP8, NVFP4, INT8, and rotated INT8 and INT4 (ConvRot).

``X.weight`` has a marker that names its format: a JSON text, in the bytes of ``X.comfy_quant`` or
among the ``layers`` of ``_quantization_metadata`` in a header's metadata. Before (ComfyUI 0.3.64)
there was only FP8: ``X.weight`` and ``X.scale_weight``, and one ``scaled_fp8`` for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.quantization.model import (
    Kind,
    Quantized,
    Scheme,
    Surroundings,
    Tensors,
    parse_object,
)
from ckptool.core.quantization.schemes.comfy.marker import Marker
from ckptool.core.quantization.schemes.comfy.rows import lay_out_fp8, lay_out_int4, lay_out_int8
from ckptool.core.quantization.schemes.comfy.tiled import lay_out_mxfp8, lay_out_nvfp4

HEADER = "_quantization_metadata"
"""The key of a header's metadata for the formats of all weights."""
MARKER, LEGACY_SCALE, LEGACY_MARKER = ".comfy_quant", ".scale_weight", "scaled_fp8"
_KIND = Kind("ComfyUI")
_SCALE, _SCALE_OF_ALL = ".weight_scale", ".weight_scale_2"
_INPUT_SCALES = (".input_scale", ".scale_input")
_LAYOUTS: Mapping[Any, Callable[[Quantized, Marker, Surroundings], TensorEntry]] = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), lay_out_fp8),
    "convrot_w4a4": lay_out_int4,
    "int8_tensorwise": lay_out_int8,
    "mxfp8": lay_out_mxfp8,
    "nvfp4": lay_out_nvfp4,
}
"""The supported formats of ComfyUI's ``QUANT_ALGOS``: not asym_w4a8_int8 and awq_w4a16."""


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield the weights with a marker, which is among ``names`` or in a header.

    Only a marker's bytes say what the format is. Where some weights have a marker, all weights with
    scales must: those without one are yielded to be refused.
    """
    tensors, names = catalog.tensors, list(names)
    markers = {n.removesuffix(MARKER): tensors[n] for n in names if n.endswith(MARKER)}
    headers = [texts[HEADER] for texts in catalog.metadata.values() if HEADER in texts]
    layers = _layers(catalog, headers)
    legacy = [name for name in names if name.rpartition(".")[2] == LEGACY_MARKER]
    scales = {n.removesuffix(LEGACY_SCALE) for n in names if n.endswith(LEGACY_SCALE)}
    scaled = set[str]()
    if markers or headers:
        scaled = {n.removesuffix(_SCALE) for n in tensors if n.endswith(_SCALE)}
    for module in sorted({*markers, *layers, *scales, *scaled}):
        markers_above = [n for n in legacy if module.startswith(n.removesuffix(LEGACY_MARKER))]
        about = [tensors[n] for n in markers_above]
        about = [markers[module], *about] if module in markers else about
        yield from _pair(tensors, module, layers.get(module), about)


def _pair(
    tensors: Tensors, module: str, recorded: object, about: list[TensorEntry]
) -> Iterator[Quantized]:
    """Yield a module's quantized weight, if it has one; ``recorded`` is its header's marker."""
    values = tensors.get(f"{module}.weight")
    scales, global_scale = (tensors.get(f"{module}{end}") for end in (_SCALE, _SCALE_OF_ALL))
    old, bias = tensors.get(f"{module}{LEGACY_SCALE}"), tensors.get(f"{module}.bias")
    if values is None or values.dtype.itemsize > 1:
        return
    if scales is None and old is not None:
        scales, recorded = old, {"format": values.dtype.name}
    inputs = (tensors.get(f"{module}{end}") for end in _INPUT_SCALES)
    yield Quantized(
        _KIND,
        values.name,
        values,
        values if scales is None else scales,
        _lay_out,
        extras=() if global_scale is None else (global_scale,),
        about=(*about, *(entry for entry in inputs if entry is not None)),
        values_beside={"marker": recorded, "rows": bias.shape[:1] if bias is not None else ()},
    )


def _join_headers(texts: Iterable[str]) -> Any:
    """Return the markers of all headers by layer; those of a single header as they are."""
    headers = [parse_object(text.encode()).get("layers") for text in dict.fromkeys(texts)]
    if len(headers) == 1:
        return headers[0]
    tables = [layers for layers in headers if isinstance(layers, dict)]
    return {name: marker for layers in tables for name, marker in layers.items()}


def _layers(catalog: Catalog, headers: Iterable[str]) -> dict[str, Any]:
    """Return the markers of a header's metadata by module, as the tensors call it.

    Some writers leave out the beginning of all names, such as ``model.diffusion_model.``.
    """
    layers = _join_headers(headers)
    if not isinstance(layers, dict):
        return {}
    modules = [n.removesuffix(".weight") for n in catalog.tensors if n.endswith(".weight")]
    by_end: dict[str, list[str]] = {}
    for module in modules:
        ends = [module[at + 1 :] for at, char in enumerate(module) if char == "."]
        for end in (module, *ends):
            by_end.setdefault(end, []).append(module)
    exact = set(modules)
    fits = {name: [name] if name in exact else by_end.get(name, []) for name in layers}
    return {fit[0]: layers[name] for name, fit in fits.items() if len(fit) == 1}


def _lay_out(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out a weight as its marker says; Unsupported if that is not understood."""
    marker, about = pair.values_beside["marker"], pair.about[:1]
    if about and about[0].name == f"{pair.module}{MARKER}":
        marker = parse_object(around.read(about[0]))
    form = marker.get("format") if isinstance(marker, dict) else None
    if not isinstance(marker, dict) or not isinstance(form, str):
        raise pair.unfit(f"no {pair.module}{MARKER} or {HEADER} says how it is quantized")
    if form not in _LAYOUTS:
        supported = ", ".join(sorted(_LAYOUTS))
        raise pair.unfit(f"ComfyUI's format {form} is not supported, only {supported}")
    if pair.scales is pair.values:
        raise pair.unfit(f"its format is {form}, but there is no {pair.module}{_SCALE}")
    if pair.values_beside["rows"] not in ((), pair.values.shape[:1]):
        raise pair.unfit("its bias has fewer rows: the others only fill a tile")
    return _LAYOUTS[form](pair, marker, around)


SCHEME = Scheme(
    find,
    (MARKER, LEGACY_SCALE, LEGACY_MARKER),
    (_KIND,),
    {"ComfyUI": "comfy_quant"},
)
