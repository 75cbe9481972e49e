"""torchao's optimizer state in 8 and 4 bits that is sharded: the shards of the tensors inside it.

torchao 0.5 to 0.18 (``subclass_8bit.py``, ``subclass_4bit.py``, ``subclass_fp8.py``) keeps
``codes``, flat for 4 bits, and ``scale``, one for each block of consecutive elements. It gathers
and slices both as the rows of the state: a rank has those of its own rows. ``qmap`` is the same on
all ranks.
"""

from __future__ import annotations

from typing import Any

from ckptool.core.box import Box
from ckptool.serialization.archive.tensors import (
    find_wrapper_class,
    is_tensor_record,
    read_outer,
    read_sizes,
    read_tensor,
    split_wrapper,
)
from ckptool.serialization.pickle.records import Call, Global, PickleValue, state_fields

_CLASSES = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
_OF_ALL = "qmap"
_Shape = tuple[int, ...]


def is_optimizer_state(value: PickleValue) -> bool:
    """Return whether a value is the record of torchao's optimizer state."""
    cls = find_wrapper_class(value)
    return cls is not None and cls.name in _CLASSES and cls.module.startswith("torchao.")


def place_part(name: str, inner: _Shape, rows: Box, whole: _Shape) -> tuple[_Shape, Box] | None:
    """Return the whole shape of a tensor inside a state, and the box that one rank's part is of it.

    ``inner`` is the part's shape, ``rows`` what the rank has of a state of shape ``whole``. None if
    these are not whole rows.
    """
    if name == _OF_ALL:
        return inner, Box.whole(inner)
    if inner == rows.shape:
        return whole, rows
    is_of_rows = rows.shape[1:] == whole[1:] and bool(rows.volume) and len(inner) == 1
    ends = [inner[0] * row for row in (rows.lo[0], rows.hi[0], whole[0])] if is_of_rows else []
    if not ends or any(end % rows.shape[0] for end in ends):
        return None
    low, high, length = (end // rows.shape[0] for end in ends)
    return (length,), Box((low,), (high,))


def split_sharded_state(value: PickleValue) -> dict[str, Any] | None:
    """Return the DTensors and values of which a DTensor of optimizer state consists.

    None for any other value, and if ranks do not have equally many rows.
    """
    if not isinstance(value, Call) or len(value.args) != 4:
        return None
    function, cls, arguments, state = value.args
    local = state_fields(state).get("_local_tensor")
    if not isinstance(cls, Global) or cls.name != "DTensor" or not is_optimizer_state(local):
        return None
    kind, parts = read_outer(local), split_wrapper(local)
    if kind is None or parts is None or not isinstance(arguments, tuple) or len(arguments) < 3:
        return None
    whole, rows = read_sizes(arguments[2]), kind[1]
    if len(rows) != len(whole) or not rows or not rows[0] or whole[0] % rows[0]:
        return None
    split: dict[str, Any] = {}
    for name, part in parts.items():
        tensor = read_tensor(part) if is_tensor_record(part) and name != _OF_ALL else None
        split[name] = part
        if tensor is not None:
            placed = place_part(name, tensor.shape, Box.whole(rows), whole)
            if placed is None:
                return None
            dtype = Global("torch", tensor.dtype.name)
            inner = arguments[0], dtype, placed[0], *arguments[3:]
            fields = {**state_fields(state), "_local_tensor": part}
            split[name] = Call(value.function, (function, cls, inner, fields))
    return split
