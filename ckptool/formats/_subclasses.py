"""Tensor subclasses that wrap others, as torchao's quantised ones: the tensors inside.

torch pickles one as ``_rebuild_wrapper_subclass`` of its outer shape, and its attributes (torch 2.0
to 2.15). What the class makes of them is its own business: they are read as they are.
"""

from __future__ import annotations

from typing import Any

from ckptool.core.dtype import DType
from ckptool.errors import Damaged
from ckptool.formats._pickle import Call, Global
from ckptool.formats._storage import attributes_of, dtype_of, sizes, unwrapped

_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_SHARDED = ("DTensor", "ShardedTensor")
_RECORDS = ("torch._utils.", "torch._tensor.")


def wrapper_class(value: Any) -> Global | None:
    """Return the class of a tensor subclass that wraps others; None for every other value.

    DTensors and ShardedTensors are none: what they wrap is a part of them.
    """
    value = unwrapped(value)
    if not isinstance(value, Call) or value.name != "torch._tensor._rebuild_from_type_v2":
        return None
    function, cls = value.args[:2] if len(value.args) == 4 else (None, None)
    if function != _WRAPPER or not isinstance(cls, Global):
        return None
    sharded = cls.name in _SHARDED and cls.module.startswith("torch.distributed.")
    return None if sharded else cls


def wrapped_parts(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a tensor subclass that wraps others; None where it wraps none."""
    if wrapper_class(value) is None:
        return None
    found = {str(name): part for name, part in attributes_of(value).items()}
    return found if any(map(is_tensor_record, found.values())) else None


def outer_of(value: Any) -> tuple[DType, tuple[int, ...]] | None:
    """Return the element type and shape that a subclass wrapping others shows to the outside.

    None for every other value; Damaged where the record is none.
    """
    if wrapper_class(value) is None:
        return None
    arguments = unwrapped(value).args[2]
    if not isinstance(arguments, tuple) or len(arguments) < 3:
        raise Damaged("a tensor subclass without its type and shape")
    return dtype_of(arguments[1]), sizes(arguments[2])


def is_tensor_record(value: Any) -> bool:
    """Whether a value is what torch pickles a tensor as, of whatever kind."""
    return isinstance(value, Call) and value.name.startswith(_RECORDS)
