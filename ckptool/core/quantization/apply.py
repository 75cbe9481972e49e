"""Replace quantized tensors with numbers: a catalog in, a catalog out."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.quantization.config import NO_GROUP, QuantizationConfig
from ckptool.core.quantization.model import Quantized, Surroundings
from ckptool.core.quantization.names import pairs, unknown_kind
from ckptool.core.quantization.scale_names import Scales
from ckptool.core.quantization.schemes import SCHEMES
from ckptool.errors import Unsupported

_OF_INPUTS = {
    "pre_quant_scale": "multiplies its inputs",
    "svdquant_lora_a": "is part of what is added to its outputs",
}
"""ModelOpt's tensors of AWQ, SmoothQuant and SVDQuant, and what a module does with them."""
_UNSUPPORTED = frozenset(["mxfp6-pack-quantized", "W4A16_AWQ", "W4A8_AWQ"])
"""Formats of compressed-tensors (0.20) and ModelOpt (0.47) of no kind here."""
_FORMATS = _UNSUPPORTED.union(
    *(kind.formats.split() for scheme in SCHEMES for kind in scheme.kinds)
)
"""Formats whose kinds are known; others may store any."""


class NoneQuantized(Unsupported):
    """A checkpoint has nothing to dequantize."""


class DequantizeResult(Struct, frozen=True):
    """A catalog with numbers in place of values and scales.

    ``kinds`` are those of the dequantized tensors, ``unfit`` is why other values have scales that
    do not fit, or an unknown kind: both by the identity of the entry's chunks, which selecting and
    renaming preserve.
    """

    catalog: Catalog
    kinds: dict[int, str]
    unfit: dict[int, Unsupported]

    def counts(self, selection: Catalog) -> dict[str, int]:
        """Count the tensors of each kind in a selection; Unsupported if one is unfit."""
        identities = [id(entry.chunks) for entry in selection.tensors.values()]
        for identity in identities:
            if identity in self.unfit:
                raise self.unfit[identity]
        return dict(Counter(self.kinds[i] for i in identities if i in self.kinds))


def dequantize(catalog: Catalog, around: Surroundings) -> DequantizeResult:
    """Replace values and scales with numbers.

    Raises NoneQuantized if no tensor is quantized, Unsupported if that is of no supported kind, and
    the errors of reading.
    """
    quantized, scales = list(pairs(catalog)), Scales(catalog.tensors)
    by_values = {pair.values.name: pair for pair in quantized}
    if not by_values:
        refusals = (unknown_kind(catalog, entry, scales) for entry in catalog.tensors.values())
        raise next(filter(None, refusals), None) or NoneQuantized(
            "--dequantize: no tensors with supported scales found",
            hint="`ckptool help formats` lists what is supported, and what it is called",
        )
    parts = {entry.name for pair in quantized for entry in pair.stored} - by_values.keys()
    result = DequantizeResult(catalog, {}, {})
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        if name in parts:
            continue
        pair = by_values.get(name)
        try:
            if pair is not None:
                _require_kind(pair, around.config)
                _require_alone(pair, catalog)
                entry = pair.lay_out(pair, around)
                result.kinds[id(entry.chunks)] = pair.kind.name
            elif unknown := unknown_kind(catalog, entry, scales):
                raise unknown
        except Unsupported as error:
            result.unfit[id(entry.chunks)] = error
        if entry.name in tensors:
            raise Unsupported(f"--dequantize: tensor {entry.name} already exists")
        tensors[entry.name] = entry
    values = {name for pair in quantized for name in pair.objects}
    objects = {name: entry for name, entry in catalog.objects.items() if name not in values}
    return replace(result, catalog=replace(catalog, tensors=tensors, objects=objects))


def _require_kind(pair: Quantized, config: QuantizationConfig) -> None:
    """Raise Unsupported if the config's method, or its group's format, stores other kinds.

    A method that no kind names stores none of them, such as HQQ; of AMD Quark's (0.13), integers,
    MX formats and rotations are not supported. Masters are no config's.
    """
    kind, method, group = pair.kind, config.method, config.group_of(pair.module)
    if group is NO_GROUP or pair.keeps_scales:
        return
    if method is not None and method not in kind.methods.split():
        raise pair.contradicts(f"quantization_config says {method}", kind.name)
    if group.format in _FORMATS and group.format not in kind.formats.split():
        raise pair.contradicts(f"{group} says {group.format}", kind.name)


def _require_alone(pair: Quantized, catalog: Catalog) -> None:
    """Raise Unsupported if a module multiplies its inputs, or adds to its outputs (ModelOpt 0.47).

    The numbers of its weight alone would compute something else.
    """
    for part, what in _OF_INPUTS.items():
        if (name := f"{pair.module}.{part}") in catalog.tensors:
            raise pair.unfit(f"{name} {what}, which its numbers leave out")
