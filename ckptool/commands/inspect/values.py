"""Non-tensor values and tensors as JSON: exactly, or as a description."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    """Return the JSON of a value; ``value`` is omitted if JSON cannot hold it."""
    described = {"name": entry.name, "type": type_name(entry.value)}
    try:
        return described | {"value": plain(entry.value)}
    except Inexact:
        pass
    try:
        return described | {"content": content(entry.value)}
    except Inexact:
        return described


class Inexact(Exception):
    """JSON cannot represent the value exactly."""


def plain(value: Any) -> Any:
    """Return the value as JSON: null, bool, 64-bit int, finite float, text, list, dict.

    Tuples become lists. Raises Inexact for all else: bytes, sets, NaN and infinities, larger ints,
    dicts whose keys are not all text, objects, and values too deep or too large.
    """
    return _plain(value, _DEEPEST, iter(range(_MOST_NODES)))


def _plain(value: Any, depth: int, budget: Iterator[int]) -> Any:
    if next(budget, None) is None or not depth:
        raise Inexact
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1, budget) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, depth - 1, budget) for key, item in value.items()}
    if isinstance(value, float):
        is_exact = math.isfinite(value)
    elif isinstance(value, int):
        is_exact = abs(value) <= _LARGEST_INT
    else:
        is_exact = value is None or isinstance(value, str)
    if not is_exact:
        raise Inexact
    return value


def content(value: Any) -> Any:
    """Return a JSON description of a value that JSON cannot represent exactly.

    A record is an object with its class under ``$type``, and its arguments and attributes; where
    it lies in itself, as the parent of a part of it, its class is under ``$again``. A class or
    function has its name under ``$name``. A part that cannot be described, or is too deep, has
    only a ``$type``. Raises Inexact if that is all of the value, or the value is too large.
    """
    described = _Description().of(value, _DEEPEST)
    if isinstance(described, dict) and described.keys() == {"$type"}:
        raise Inexact
    return described


class _Description:
    """The description of one value, of a limited number of nodes."""

    def __init__(self) -> None:
        self._budget = iter(range(_MOST_NODES))
        self._open: set[int] = set()

    def of(self, value: Any, depth: int) -> Any:
        """Describe a part of the value, at most ``depth`` levels deep."""
        if next(self._budget, None) is None:
            raise Inexact
        if isinstance(value, Call) and (simple := simple_value(value)) is not None:
            return simple if isinstance(simple, bool | int | float) else str(simple)
        if isinstance(value, Global):
            return {"$name": str(value)}
        if isinstance(value, list | tuple | set | frozenset | dict | Call):
            return self._container(value, depth)
        try:
            return value if isinstance(value, float | str) else plain(value)
        except Inexact:
            return {"$type": type_name(value)}

    def _container(self, value: Any, depth: int) -> Any:
        if id(value) in self._open:
            return {"$again": type_name(value)}
        if not depth:
            return {"$type": type_name(value)}
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
        made = {"$args": [self.of(part, depth) for part in arguments]} if arguments else {}
        own = {key: self.of(part, depth) for key, part in fields.items()}
        return {"$type": type_name(value), **made, **own}
