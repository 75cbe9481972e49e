"""Values that are a ``Mapping`` in memory: torch's DCP enters them like dicts (2.4 to 2.15).

In a catalog, those of another class are one value each, so that the class is kept: a scheduler's
Counter of milestones, a trainer's own class for its settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, flat_name
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.state_dict.tree import find_free_name

_DEEPEST = 100
"""A value that is nested deeper is one that torch does not save either."""


def enter_mappings(catalog: Catalog, whole: Container[str] = ()) -> Catalog:
    """Return the catalog with one value for each key of a value of a class that is a ``Mapping``.

    An empty one becomes an empty dict. What a tuple holds stays as it is, a dict that is one value
    in its format, and values with the names ``whole``.
    """
    values: list[ObjectEntry] = []
    names = {*catalog.tensors, *catalog.objects}
    for entry in catalog.objects.values():
        is_whole = entry.name in whole or not _has_class(entry.value) or _is_in_tuple(entry)
        for path, value in [] if is_whole else _enter(entry, ()):
            name = entry.name + flat_name(path)[len(flat_name(entry.path)) :]
            if name != entry.name and name in names:
                name = find_free_name(name, names)
            names.add(name)
            values.append(ObjectEntry(name, path, value))
        values += [entry] * is_whole
    return replace(catalog, objects={value.name: value for value in values})


def _is_in_tuple(entry: ObjectEntry) -> bool:
    return any(isinstance(step, Index) and step.container == "tuple" for step in entry.path)


def _enter(entry: ObjectEntry, inside: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    """Yield the paths and values that torch takes a value for, which is ``inside`` others."""
    items = _items(entry.value)
    if items is None or id(entry.value) in inside or len(inside) > _DEEPEST:
        yield entry.path, entry.value
        return
    if not items:
        yield entry.path, {}
    for step, item in items:
        part = replace(entry, path=(*entry.path, step), value=item)
        yield from _enter(part, (*inside, id(entry.value)))


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what is in a value that torch enters, by the steps to it; None of every other one."""
    if isinstance(value, list) and _holds(value, lambda item: mapping_entries(item) is not None):
        return [(Index(position), item) for position, item in enumerate(value)]
    return mapping_entries(value)


def _has_class(value: Any) -> bool:
    """Return whether a value is a ``Mapping`` of another class than dict, or a list with one."""
    if isinstance(value, list):
        return _holds(value, _has_class)
    return isinstance(value, Call | Counter) and mapping_entries(value) is not None


def _holds(value: list[Any], is_meant: Callable[[Any], bool]) -> bool:
    stack, ids = [value], set[int]()
    while stack:
        items = stack.pop()
        if any(is_meant(item) for item in items if not isinstance(item, list)):
            return True
        ids.add(id(items))
        stack += [item for item in items if isinstance(item, list) and id(item) not in ids]
    return False


def mapping_entries(value: object) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of what is a ``Mapping`` in memory; None of every other value.

    That is a dict, a Counter, a defaultdict, or an object of another class that is filled by keys;
    one that has none cannot be told from other objects.
    """
    if isinstance(value, dict):
        return list(value.items())
    if not isinstance(value, Call):
        return None
    if value.name == "collections.Counter":
        counts = value.args[0] if value.args else {}
        return list(counts.items()) if isinstance(counts, dict) else None
    is_mapping = value.name == "collections.defaultdict" or (value.is_filled and value.entries)
    return value.entries if is_mapping else None
