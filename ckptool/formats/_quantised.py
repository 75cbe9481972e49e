"""Tensors that torch quantised, taken apart: the integers, and what makes numbers of them.

torch 1.6 to 2.13 pickles one as ``_rebuild_qtensor`` of the storage of its integers and the
parameters of its quantizer. The parts are called as torch's own functions that return them:
``int_repr``; for one scale ``q_scale`` and ``q_zero_point``; for one scale a channel
``q_per_channel_scales``, ``q_per_channel_zero_points`` (tensors) and ``q_per_channel_axis``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckptool.core.dtype import QUANTISED_STORAGES
from ckptool.formats._pickle import Call, Global, Persistent
from ckptool.formats._storage import unwrapped

INTEGERS = "int_repr"

_ONE_SCALE = ("q_scale", "q_zero_point")
_CHANNELS = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
_BY_SCHEME = {
    "per_tensor_affine": _ONE_SCALE,
    "per_channel_affine": _CHANNELS,
    "per_channel_affine_float_qparams": _CHANNELS,
}
_REBUILD_QUANTISED = Global("torch._utils", "_rebuild_qtensor")
_REBUILD = Global("torch._utils", "_rebuild_tensor")


def quantised_parts(value: Any) -> dict[str, Any] | None:
    """The parts of a quantised tensor by name; None for every other value.

    None too where several numbers share a byte (``quint4x2``), or the quantizer is none of torch's
    affine ones: such tensors are left as they are.
    """
    value = unwrapped(value)
    if not isinstance(value, Call) or value.function != _REBUILD_QUANTISED or len(value.args) < 5:
        return None
    storage, parameters = value.args[0], value.args[4]
    if not _is_of_whole_bytes(storage) or not isinstance(parameters, tuple) or not parameters:
        return None
    scheme, *rest = parameters
    names = _BY_SCHEME.get(scheme.name, ()) if isinstance(scheme, Global) else ()
    if not names or len(names) != len(rest):
        return None
    return {INTEGERS: Call(_REBUILD, value.args[:4]), **dict(zip(names, rest, strict=True))}


def _is_of_whole_bytes(storage: Any) -> bool:
    """Whether a persistent id is that of a storage of integers of whole bytes."""
    value = storage.value if isinstance(storage, Persistent) else None
    kind = value[1] if isinstance(value, tuple) and len(value) > 1 else None
    return isinstance(kind, Global) and kind.name in QUANTISED_STORAGES


def quantised_notes(names: Collection[str]) -> list[str]:
    """What to say of the quantised tensors whose parts are among the names of leaves."""
    return [
        f"{name}: quantised; {name}.{INTEGERS} holds its integers, {name}.{parameters[0]} and"
        f" {parameters[1]} what makes numbers of them"
        for one in names
        if (name := one.removesuffix(f".{INTEGERS}")) != one
        for parameters in (_ONE_SCALE, _CHANNELS)
        if f"{name}.{parameters[0]}" in names
    ]
