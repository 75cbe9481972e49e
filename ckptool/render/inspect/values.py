"""Non-tensor values, briefly on the screen and exactly in JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import date, time, timedelta
from itertools import chain
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.core.state_category import state_category
from ckptool.render.inspect.records import content_of, simple_value
from ckptool.render.text import visible
from ckptool.serialization.pickle.records import Call, Global, Persistent
from ckptool.serialization.state_dict.values import type_name

_DEEPEST = 32
_MOST_NODES = 1 << 20
_LARGEST_INT = (1 << 63) - 1
_HYPERPARAMETERS = ("lr", "initial_lr", "betas", "momentum", "eps", "weight_decay")


class Inexact(Exception):
    """JSON cannot hold the value exactly."""


def plain(value: Any) -> Any:
    """Return the value as JSON holds it: null, bool, 64-bit int, finite float, text, list, dict.

    Tuples become lists. Raises Inexact for all else: bytes, sets, NaN and infinities, larger ints,
    dicts whose keys are not all text, objects, and values too deep or too large to be written.
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
    """Return what JSON can hold of a value that it cannot hold exactly.

    A record is an object with its class under ``$type``, and its arguments and attributes.
    Raises Inexact where nothing is known of a part of it.
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


def preview(value: Any, limit: int = 60) -> str:
    """Return a value in at most about ``limit`` characters, without more work than that."""
    if isinstance(value, list | tuple | set | frozenset):
        return _container(value, limit)
    if isinstance(value, dict):
        items = (f"{preview(k, 20)}: {preview(v, limit // 2)}" for k, v in value.items())
        return _enclosed(items, "{}", len(value), limit)
    if isinstance(value, bytes | bytearray):
        return f"{len(value):,} bytes"
    if isinstance(value, Call) and (shown := _record(value, limit)) is not None:
        return shown
    if isinstance(value, str):
        cut = f"{value[:limit]}…" if len(value) > limit else value
        return "'" + visible(cut) + "'"
    return visible(_atom(value))


def _record(call: Call, limit: int) -> str | None:
    """Return what a record holds, None where its name is all there is to say."""
    simple = simple_value(call)
    if simple is not None:
        is_time = isinstance(simple, date | time | timedelta)
        return str(simple) if is_time else preview(simple, limit)
    parts = content_of(call)
    if parts is None:
        return None
    arguments, fields = parts
    name, count = visible(call.name.rpartition(".")[2]), len(arguments) + len(fields)
    if limit < 4:
        return f"{name}(… {count:,} items)"
    shown = chain(
        (preview(each, limit // 2) for each in arguments),
        (f"{visible(key)}={preview(each, limit // 2)}" for key, each in fields.items()),
    )
    return name + _enclosed(shown, "()", count, limit)


def _container(value: Any, limit: int) -> str:
    if limit < 4 and value:
        return f"{len(value):,} items"
    brackets = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    if not value and isinstance(value, set | frozenset):
        return "set()"
    return _enclosed((preview(item, limit // 2) for item in value), brackets, len(value), limit)


def _enclosed(items: Iterable[str], brackets: str, count: int, limit: int) -> str:
    shown: list[str] = []
    room = limit
    for item in items:
        room -= len(item) + 2
        if room < 0:
            shown.append(f"… {count:,} items")
            break
        shown.append(item)
    return brackets[0] + ", ".join(shown) + brackets[1]


def _atom(value: Any) -> str:
    if isinstance(value, Global):
        return str(value)
    if isinstance(value, Call) and value.name in ("torch.Size", "torch.device"):
        return value.name + preview(value.args)
    if isinstance(value, Call | Persistent):
        return f"<{type_name(value)}>"
    if isinstance(value, int) and abs(value) > 1 << 256:
        return f"an int of {value.bit_length():,} bits"
    return repr(value)


def notable_values(entries: Iterable[ObjectEntry], most: int = 8) -> list[tuple[str, str]]:
    """Return what a person asks for first: short values outside the optimizer, then its rates."""
    others: list[ObjectEntry] = []
    optimizer: list[ObjectEntry] = []
    for entry in entries:
        is_optimizer = state_category(entry) == "optimizer"
        (optimizer if is_optimizer else others).append(entry)
    short = [entry for entry in others if isinstance(entry.value, int | float | str)]
    short.sort(key=lambda entry: len(entry.path))
    values = [(entry.name, preview(entry.value)) for entry in short[:most]]
    return values + _hyperparameters(optimizer)


def _hyperparameters(entries: Iterable[ObjectEntry]) -> list[tuple[str, str]]:
    """Return each rate of the optimizer once, with all values that its groups give it."""
    rates: dict[str, dict[str, None]] = {}
    for entry in entries:
        last = str(entry.path[-1]).rpartition(".")[2]
        if last in _HYPERPARAMETERS:
            rates.setdefault(last, {})[preview(entry.value)] = None
    return [
        (f"optimizer {name}", " | ".join([*list(rates[name])[:4], *["…"][: len(rates[name]) > 4]]))
        for name in _HYPERPARAMETERS
        if name in rates
    ]
