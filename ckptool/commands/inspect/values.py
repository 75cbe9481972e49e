"""Non-tensor values and tensors as JSON: exactly, or as a description."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ckptool.commands.inspect.records import content_of, simple_value
from ckptool.core.catalog import ObjectEntry, TensorEntry
from ckptool.core.state_category import state_category
from ckptool.serialization.pickle.records import Call
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

    A record is an object with its class under ``$type``, and its arguments and attributes. Raises
    Inexact if a part of it is unknown.
    """
    return _content(value, _DEEPEST, iter(range(_MOST_NODES)))


def _content(value: Any, depth: int, budget: Iterator[int]) -> Any:
    if next(budget, None) is None or not depth:
        raise Inexact

    def inner(part: Any) -> Any:
        return _content(part, depth - 1, budget)

    if isinstance(value, list | tuple | set | frozenset):
        return [inner(part) for part in value]
    if isinstance(value, dict):
        return {str(key): inner(part) for key, part in value.items()}
    if isinstance(value, Call) and (simple := simple_value(value)) is not None:
        return simple if isinstance(simple, bool | int | float) else str(simple)
    if isinstance(value, Call) and (parts := content_of(value)) is not None:
        arguments = {"$args": list(map(inner, parts[0]))} if parts[0] else {}
        fields = {key: inner(part) for key, part in parts[1].items()}
        return {"$type": type_name(value), **arguments, **fields}
    return value if isinstance(value, float | str) else _plain(value, depth, budget)
