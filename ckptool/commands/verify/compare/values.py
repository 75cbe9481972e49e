"""Non-tensor values as canonical JSON, which is equal if and only if the values are.

null, booleans, integers, finite floats, text, lists and dicts whose keys are all text are
themselves; all else is an object with one key that begins with ``$``: ``{"$tuple": [...]}``,
``{"$bytes": "hex"}``, ``{"$float": "nan"}``, ``{"$complex": [re, im]}``, ``{"$set": [...]}``,
``{"$dict": [[key, value], ...]}``, ``{"$global": "torch.float32"}``, ``{"$call": [...]}``. Without
spaces, with sorted keys, in ASCII.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.errors import Unsupported
from ckptool.serialization.pickle.records import Call, Global, Persistent
from ckptool.serialization.state_dict.mappings import mapping_entries
from ckptool.serialization.state_dict.values import type_name

_DEEPEST = 200
_MOST_NODES = 1 << 20
_LARGEST_INT = 1 << 4096
_MOST_SHOWN = 3
_LONGEST_SHOWN = 60


def canonical_text(content: Any) -> str:
    """Return JSON without spaces, keys sorted, ASCII only: one text for one content."""
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def value_text(value: Any, name: str) -> str:
    """Return the canonical JSON of a checkpoint's value.

    Raises Unsupported if it is too deep or too large to be written (a million parts).
    """
    try:
        return canonical_text(_plain(value, _DEEPEST, iter(range(_MOST_NODES)), name))
    except RecursionError:
        raise _too_large(name) from None


def value_digest(value: Any, name: str) -> str:
    """Return the SHA-256 (hex) of a value's canonical JSON."""
    return text_digest(value_text(value, name))


def difference(one: object, other: object) -> str:
    """Return how two unequal values differ: of lists and dicts, their first items that differ."""
    texts = list(islice(_differences(one, other, ""), _MOST_SHOWN + 1))
    end = "; and more" if len(texts) > _MOST_SHOWN else ""
    return f"{'; '.join(texts[:_MOST_SHOWN])}{end}" if texts else _both_texts("", one, other)


def _differences(one: object, other: object, at: str) -> Iterator[str]:
    """Yield how two values differ, by the place of each item in them."""
    items, other_items = _items(one), _items(other)
    if type(one) is not type(other) or items is None or other_items is None:
        if value_text(one, at) != value_text(other, at):
            yield _both_texts(at, one, other)
        return
    if not isinstance(one, dict) and len(items) != len(other_items):
        yield f"{at} A {len(items):,} items, B {len(other_items):,}".lstrip()
    for key, value in items.items():
        if key in other_items:
            yield from _differences(value, other_items[key], f"{at}[{short_text(key)}]")
        elif isinstance(one, dict):
            yield f"{at}[{short_text(key)}] only A: {short_text(value)}"
    if isinstance(one, dict):
        for key in (key for key in other_items if key not in items):
            yield f"{at}[{short_text(key)}] only B: {short_text(other_items[key])}"


def _items(value: object) -> dict[Any, Any] | None:
    """Return the items of a dict, list or tuple by their keys; None of another value."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else None


def _both_texts(at: str, one: object, other: object) -> str:
    return f"{at} A {short_text(one)}, B {short_text(other)}".lstrip()


def short_text(value: object) -> str:
    """Return a small plain value as it is, any other by its type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
    return f"a {type_name(value)}"


def text_digest(text: str) -> str:
    """Return the SHA-256 (hex) of ASCII text."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _too_large(name: str) -> Unsupported:
    return Unsupported(
        f"{name}: a value of more than {_MOST_NODES:,} parts, or nested more than {_DEEPEST} deep,"
        " cannot be compared",
        hint=f"exclude it with --drop '{name}'",
    )


def _plain(value: Any, depth: int, budget: Iterator[int], name: str) -> Any:
    if next(budget, None) is None or not depth:
        raise _too_large(name)

    def inner(item: Any) -> Any:
        return _plain(item, depth - 1, budget, name)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if isinstance(value, dict):
        return _dict(value, inner)
    if isinstance(value, tuple):
        return {"$tuple": [inner(item) for item in value]}
    if isinstance(value, set | frozenset):
        kind = "$set" if isinstance(value, set) else "$frozenset"
        return {kind: sorted((inner(item) for item in value), key=canonical_text)}
    if isinstance(value, Call):
        parts = (value.function, list(value.args), value.state, value.items, value.entries)
        return {"$call": [inner(part) for part in parts]}
    if isinstance(value, Persistent):
        return {"$storage": inner(value.value)}
    return _scalar(value)


def _dict(value: dict[Any, Any], inner: Any) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: inner(item) for key, item in value.items()}
    pairs = [[inner(key), inner(item)] for key, item in value.items()]
    return {"$dict": sorted(pairs, key=canonical_text)}


def _scalar(value: Any) -> Any:
    if isinstance(value, Global):
        return {"$global": str(value)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes" if isinstance(value, bytes) else "$bytearray": value.hex()}
    if isinstance(value, complex):
        return {"$complex": [_scalar(value.real), _scalar(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST_INT:
        return {"$int": hex(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"$other": type(value).__name__}


class Unfolded(Struct, frozen=True):
    """A catalog with flattened values; ``origins`` are the values that its values come from."""

    catalog: Catalog
    origins: dict[str, str]

    def whole(self, names: Collection[str | None]) -> int:
        """Return how many of the values have all their parts among these names."""
        return len(
            {*self.origins.values()} - {o for n, o in self.origins.items() if n not in names}
        )


def unfolded(catalog: Catalog, other: Catalog) -> Unfolded:
    """Flatten dicts and lists in which the other one has names."""
    heads = {
        name[:at] for name in other.objects for at, char in enumerate(name) if char == "."
    } - other.objects.keys()
    objects: dict[str, ObjectEntry] = {}
    origins: dict[str, str] = {}
    for name, entry in catalog.objects.items():
        for part, value in _parts(name, entry.value, heads):
            objects[part] = entry if part == name else ObjectEntry(part, (part,), value)
            origins[part] = name
    return Unfolded(replace(catalog, objects=objects), origins)


def _parts(name: str, value: Any, heads: set[str]) -> Iterator[tuple[str, Any]]:
    is_listed = isinstance(value, list | tuple)
    items = [*enumerate(value)] if is_listed else mapping_entries(value)
    if name not in heads or not items:
        yield name, value
        return
    for key, inner in items:
        yield from _parts(f"{name}.{key}", inner, heads)
