"""Quantized tensors of a torch.save pickle, as the parts that they consist of.

torch 1.6 to 2.13 pickles one as ``_rebuild_qtensor`` of the storage of its integers and the
parameters of its quantizer. Its parts have the names of torch's functions that return them:
``int_repr``; for one scale ``q_scale`` and ``q_zero_point``; for a scale per channel
``q_per_channel_scales``, ``q_per_channel_zero_points`` (tensors) and ``q_per_channel_axis``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckptool.core.dtype import QUANTIZED_STORAGES
from ckptool.serialization.archive.tensors import is_changed, unwrap
from ckptool.serialization.pickle.records import Call, Global, Persistent, PickleValue

_REBUILD = Global("torch._utils", "_rebuild_tensor")
QUANTIZED = "torch._utils._rebuild_qtensor"
INTEGERS = "int_repr"
_ONE_SCALE = ("q_scale", "q_zero_point")
_CHANNELS = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
_BY_SCHEME = {
    "per_tensor_affine": _ONE_SCALE,
    "per_channel_affine": _CHANNELS,
    "per_channel_affine_float_qparams": _CHANNELS,
}


def split_quantized(value: PickleValue) -> dict[str, Any] | None:
    """Return the parts of a quantized tensor by name; None for every other value.

    Also None if several numbers share a byte (``quint4x2``), the quantizer is not one of torch's
    affine ones, or its content is set later: such tensors stay as they are.
    """
    value = unwrap(value)
    if not isinstance(value, Call) or value.name != QUANTIZED or len(value.args) < 5:
        return None
    storage, parameters = value.args[0], value.args[4]
    if is_changed(value) or not _has_whole_bytes(storage):
        return None
    if not isinstance(parameters, tuple) or not parameters:
        return None
    scheme, *rest = parameters
    names = _BY_SCHEME.get(scheme.name, ()) if isinstance(scheme, Global) else ()
    if not names or len(names) != len(rest):
        return None
    return {INTEGERS: Call(_REBUILD, value.args[:4]), **dict(zip(names, rest, strict=True))}


def _has_whole_bytes(storage: PickleValue) -> bool:
    """Return whether a persistent id is of a storage of whole-byte integers."""
    value = storage.value if isinstance(storage, Persistent) else None
    cls = value[1] if isinstance(value, tuple) and len(value) > 1 else None
    return isinstance(cls, Global) and cls.name in QUANTIZED_STORAGES


def describe_quantized(names: Collection[str]) -> list[str]:
    """Return a note on each quantized tensor whose parts are among the names of leaves."""
    return [
        f"{name} is quantized: its integers are read as {leaf}, with {name}.{parameters[0]} and"
        f" {parameters[1]}"
        for leaf in names
        if (name := leaf.removesuffix(f".{INTEGERS}")) != leaf
        for parameters in (_ONE_SCALE, _CHANNELS)
        if f"{name}.{parameters[0]}" in names
    ]
