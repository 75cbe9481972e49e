"""Non-tensor values and tensors as JSON: exactly, or as a description."""

from __future__ import annotations

import math
from typing import Any

from ckptool.commands.inspect.records import content_of, simple_value
from ckptool.core.catalog import ObjectEntry, TensorEntry
from ckptool.core.state_category import state_category
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.state_dict.values import type_name

_DEEPEST = 32
_MOST_NODES = 1 << 20
_LARGEST_INT = (1 << 63) - 1


def tensor_row(entry: TensorEntry) -> dict[str, Any]:
    """Return the plain JSON of a tensor."""
    placements = entry.placements
    return {
        "name": entry.name,
        "part": state_category(entry),
        "dtype": entry.dtype.name,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "placements": None if placements is None else list(map(str, placements)),
        "chunks": len(entry.chunks),
    }


def value_row(entry: ObjectEntry) -> dict[str, Any]:
    """Return the JSON of a value: the ``value`` as it is, or else a description, its ``content``.

    Neither of what is too large, or cannot be described.
    """
    row = {"name": entry.name, "type": type_name(entry.value)}
    try:
        described, is_exact = describe(entry.value)
    except Indescribable:
        return row
    return row | {"value" if is_exact else "content": described}


class Indescribable(Exception):
    """No JSON says more of a value than its type."""


def describe(value: Any) -> tuple[Any, bool]:
    """Return a value as JSON, and whether that represents it exactly.

    Exact are null, bool, 64-bit int, finite float, text, and lists, tuples and dicts of them whose
    keys are text. Otherwise a record is an object with its class under ``$type``, and its arguments
    and attributes; where it lies in itself, as the parent of a part of it, its class is under
    ``$again``. A class or function has its name under ``$name``. A part that cannot be described,
    or is too deep, has only a ``$type``. Raises Indescribable if that is all of the value, or the
    value is too large.
    """
    description = _Description()
    described = description.of(value, _DEEPEST)
    if not description.is_exact and isinstance(described, dict) and described.keys() == {"$type"}:
        raise Indescribable
    return described, description.is_exact


class _Description:
    """The description of one value, of a limited number of nodes."""

    def __init__(self) -> None:
        self.is_exact = True
        self._budget = iter(range(_MOST_NODES))
        self._open: set[int] = set()

    def of(self, value: Any, depth: int) -> Any:
        """Describe a part of the value, at most ``depth`` levels deep."""
        if next(self._budget, None) is None:
            raise Indescribable
        self.is_exact = self.is_exact and _is_exact(value)
        if isinstance(value, Call) and (simple := simple_value(value)) is not None:
            return simple if isinstance(simple, bool | int | float) else str(simple)
        if isinstance(value, Global):
            return {"$name": str(value)}
        if isinstance(value, list | tuple | set | frozenset | dict | Call):
            return self._container(value, depth)
        return value if isinstance(value, float) or _is_exact(value) else self._type(value, "$type")

    def _type(self, value: Any, key: str) -> dict[str, str]:
        self.is_exact = False
        return {key: type_name(value)}

    def _container(self, value: Any, depth: int) -> Any:
        if id(value) in self._open:
            return self._type(value, "$again")
        if not depth:
            return self._type(value, "$type")
        self._open.add(id(value))
        described = self._parts(value, depth - 1)
        self._open.remove(id(value))
        return described

    def _parts(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {str(key): self.of(part, depth) for key, part in value.items()}
        if not isinstance(value, Call):
            return [self.of(part, depth) for part in value]
        arguments, fields = content_of(value) or ((), {})
        head = {"$args": [self.of(part, depth) for part in arguments]} if arguments else {}
        attributes = {key: self.of(part, depth) for key, part in fields.items()}
        return {"$type": type_name(value), **head, **attributes}


def _is_exact(value: Any) -> bool:
    """Return whether JSON has a value as it is, besides what is in it."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) <= _LARGEST_INT
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    return value is None or isinstance(value, str | list | tuple)
