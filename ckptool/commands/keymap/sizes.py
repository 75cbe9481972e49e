"""The sizes of a key map's axes: as given, or from the model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptool.commands.model.records import Record
from ckptool.core.keymap.match import ModelFacts
from ckptool.core.keymap.model import KeyMap
from ckptool.errors import UsageError

_LARGEST = 1 << 63
_SIGNS: Mapping[str, Callable[[int, int], int | None]] = {
    "*": lambda one, other: one * other if one * other < _LARGEST else None,
    "/": lambda whole, part: None if whole % part else whole // part,
    "-": lambda whole, part: whole - part if whole >= part else None,
}
"""The operators in an expression of sizes."""
Seen = dict[tuple[str, bool], int | None]
"""The dims already looked up: their sizes, None while in progress and if they have none.

Each with or without the given sizes.
"""


def facts(key_map: KeyMap, records: Sequence[Record], dims: Mapping[str, int]) -> ModelFacts:
    """Return the sizes of a map's axes, given or recorded, and all facts that hold."""
    merged = merge(records)
    unknown = dims.keys() - key_map.axes
    if unknown:
        names = key_map.sizes or sorted(key_map.axes)
        raise UsageError(
            f"--dim {min(unknown)}: unknown dim of map {key_map.name}",
            hint="known dims: " + ", ".join(names) if names else None,
        )
    sizes = {**dims}
    for name in key_map.sizes:
        size = (
            sizes[name]
            if name in sizes
            else _look_up(name, key_map, merged, sizes, {(name, True): None})
        )
        if size is not None:
            sizes[name] = size
    return ModelFacts(sizes, frozenset(n for n, value in merged.items() if value is True))


def merge(records: Sequence[Record]) -> dict[str, Any]:
    """Return what is recorded of a model, each value from the strongest record that has it."""
    merged: dict[str, Any] = {}
    for record in reversed(records):
        merged |= {name: value for name, value in record.items() if value is not None}
    return merged


def _look_up(
    name: str, key_map: KeyMap, merged: Record, sizes: Mapping[str, int], memo: Seen
) -> int | None:
    """Return the first size that a dim's keys, or expressions of two sizes, yield.

    An expression yields none if one of its sizes is unknown, does not divide, or is too small. A
    dim whose size defaults to another's takes only a recorded one: a given size does not apply to
    it.
    """
    for lookup in key_map.sizes[name]:
        if isinstance(lookup, int):
            return lookup
        words = lookup.split()
        known_sizes = sizes if len(words) > 1 else {}
        value, *rest = (_value(word, key_map, merged, known_sizes, memo) for word in words[::2])
        for sign, other in zip(words[1::2], rest, strict=False):
            value = _SIGNS[sign](value, other) if value and other else None
        if value is not None:
            return value
    return None


def _value(
    word: str, key_map: KeyMap, merged: Record, sizes: Mapping[str, int], memo: Seen
) -> int | None:
    """Return a record's number, the length of a list (``KEY.length``), or another dim's size."""
    if word in sizes:
        return sizes[word]
    listed = merged.get(word.removesuffix(".length")) if word.endswith(".length") else None
    number = len(listed) if isinstance(listed, str | list) else merged.get(word)
    if type(number) is int and number > 0:
        return number
    key = word, bool(sizes)
    if word in key_map.sizes and key not in memo:
        memo[key] = None
        memo[key] = _look_up(word, key_map, merged, sizes, memo)
    return memo.get(key)
