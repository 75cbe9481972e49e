"""What torch's DCP (2.4 to 2.15) can store and load of a catalog: paths, empty dicts, the root."""

from __future__ import annotations

from collections.abc import Container

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, Path, flat_name
from ckptool.core.selection import AnyEntry, entries_of, with_entries


def with_loadable_paths(catalog: Catalog) -> Catalog:
    """Set the paths under which torch's DCP loader (2.4 to 2.15) rebuilds every entry's name.

    It builds one dict and flattens that again. So a list at the root, or one with missing indices,
    becomes a dict of indices; and an entry at the root itself, under an empty key, or at a path
    that is another entry's name, is stored under its name.
    """
    positions: dict[Path, set[int]] = {}
    entries = entries_of(catalog)
    for entry in entries:
        for at, step in enumerate(entry.path):
            if isinstance(step, Index):
                positions.setdefault(entry.path[:at], set()).add(step.position)
    broken = {head for head, seen in positions.items() if not head or seen != {*range(len(seen))}}
    if not broken and all(flat_name(entry.path) == entry.name for entry in entries):
        return catalog
    return with_entries(catalog, (_at_loadable_path(entry, broken) for entry in entries))


def _at_loadable_path(entry: AnyEntry, broken: Container[Path]) -> AnyEntry:
    path = entry.path
    if flat_name(path) != entry.name:
        return replace(entry, path=(entry.name,))
    steps = (str(s) if path[:at] in broken else s for at, s in enumerate(path))
    return replace(entry, path=tuple(steps))


def empty_dicts(catalog: Catalog) -> list[str]:
    """Return the names of empty dicts, which DCP does not store (torch 2.4 to 2.15)."""
    return [name for name, entry in catalog.objects.items() if entry.value == {}]


def root_problem(catalog: Catalog) -> str | None:
    """Return what DCP cannot store at the catalog's root, and how it is written; None if it can."""
    for entry in entries_of(catalog):
        if not entry.path:
            return f"DCP stores dicts only: the value is written as {{{entry.name!r}: ...}}"
        if isinstance(entry.path[0], Index):
            kind = entry.path[0].container
            return f"DCP stores dicts only: the {kind} is written as a dict of its indices"
        if not flat_name(entry.path):
            return f"DCP does not allow empty names: the value at '' is written as {entry.name!r}"
    return None
