"""Pickled torch modules as inert records: what their ``state_dict()`` would hold.

A module is an object whose attributes are kept as they are in memory (torch 1.0 to 2.15):
``_parameters``, ``_buffers`` and ``modules``, each a dict by name, and the set of the names of
buffers that are not saved. What a class of its own adds by code cannot be known.

Tensor subclasses that wrap others, as torchao's quantised ones: the tensors inside.

torch pickles one as ``_rebuild_wrapper_subclass`` of its outer shape, and its attributes (torch 2.0
to 2.15). What the class makes of them is its own business: they are read as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.core.dtype import DType
from ckptool.errors import Damaged
from ckptool.serialization.archive.storage import attributes_of, dtype_of, sizes, unwrapped
from ckptool.serialization.pickle.records import Call, Global


class Module(NamedTuple):
    """What a module holds itself, by name, and the modules in it."""

    tensors: list[tuple[str, Any]]
    children: list[tuple[str, Any]]


def module_state(value: Any) -> Module | None:
    """Return what a module's record holds, in the order of ``state_dict()``; None for all else."""
    if not isinstance(value, Call) or value.state is None:
        return None
    fields = value.fields
    parts = [fields.get(name) for name in ("_parameters", "_buffers", "_modules")]
    parameters, buffers, modules = (one if isinstance(one, dict) else None for one in parts)
    if parameters is None or buffers is None or modules is None:
        return None
    passing = _names(fields.get("_non_persistent_buffers_set"))
    kept = {name: buffer for name, buffer in buffers.items() if name not in passing}
    tensors = [*parameters.items(), *kept.items()]
    return Module(
        [(str(name), tensor) for name, tensor in tensors if tensor is not None],
        [(str(name), child) for name, child in modules.items() if child is not None],
    )


def _names(value: Any) -> set[str]:
    """Return the members of a set of names, as protocol 2 writes it or later ones."""
    if isinstance(value, Call) and len(value.args) == 1:
        value = value.args[0]
    names = value if isinstance(value, list | tuple | set | frozenset) else ()
    return {name for name in names if isinstance(name, str)}


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
