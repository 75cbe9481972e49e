"""Containers that are in a catalog but not in a DCP folder as torch writes it (2.4 to 2.15).

torch does not enter tuples, nor a list that has nothing but values and such tuples: each is one
value, with its tensors. It enters what is a ``Mapping``, such as a scheduler's Counter of
milestones: each key is a value of its own. An empty one is nothing at all. A state dict loads only
if a checkpoint has them alike: torch takes one that has a key for an empty dict for one that torch
2.3 wrote, and looks for all keys of that time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, TensorEntry, flat_name
from ckptool.core.selection import (
    AnyEntry,
    drop_names,
    entries_of,
    with_entries,
)
from ckptool.errors import Problem
from ckptool.formats.writing import nest_state
from ckptool.serialization.state_dict.loadable import empty_dicts, with_loadable_paths
from ckptool.serialization.state_dict.values import NOT_CARRIED


def without_empty_dicts(catalog: Catalog) -> tuple[Catalog, list[str]]:
    """Return the catalog without empty dicts, and a note on each.

    A list that had one becomes a dict of indices: torch finds no value at the position that is
    missing, and refuses to load.
    """
    empty = empty_dicts(catalog)
    notes = [
        Problem(f"not carried: {name}: DCP does not store empty dicts", NOT_CARRIED, tensor=name)
        for name in empty
    ]
    return with_loadable_paths(drop_names(catalog, empty)), [*notes]


def join_whole(catalog: Catalog) -> Catalog:
    """Return the catalog with one value for each container that torch does not enter."""
    entries = entries_of(catalog)
    ends = [_end_of(entry) for entry in entries]
    while (joined := _join_lists(entries, ends)) != ends:
        ends = joined
    rest: list[AnyEntry] = []
    below: dict[Path, list[AnyEntry]] = defaultdict(list)
    for entry, end in zip(entries, ends, strict=True):
        is_inside = end is not None and end < len(entry.path)
        (below[entry.path[:end]] if is_inside else rest).append(entry)
    if not below:
        return catalog
    return with_entries(catalog, [*rest, *map(_joined, below, below.values())])


def _end_of(entry: AnyEntry) -> int | None:
    """Return how many steps of its path lead to the value that has it; None for a tensor."""
    steps = enumerate(entry.path)
    whole = (at for at, step in steps if isinstance(step, Index) and step.container == "tuple")
    return next(whole, None if isinstance(entry, TensorEntry) else len(entry.path))


def _join_lists(entries: Iterable[AnyEntry], ends: list[int | None]) -> list[int | None]:
    """Return the ends after lists were joined that have nothing but values, some of them joined."""
    entered, joins = set[Path](), set[Path]()
    for entry, end in zip(entries, ends, strict=True):
        for at, step in enumerate(entry.path[:end]):
            if isinstance(step, Index) and at + 1 != end:
                entered.add(entry.path[:at])
        if end is not None and end < len(entry.path) and isinstance(entry.path[end - 1], Index):
            joins.add(entry.path[: end - 1])
    joins -= entered
    return [
        end - 1 if end is not None and entry.path[: end - 1] in joins else end
        for entry, end in zip(entries, ends, strict=True)
    ]


def _joined(path: Path, entries: Iterable[AnyEntry]) -> ObjectEntry:
    inner = [replace(entry, path=entry.path[len(path) :]) for entry in entries]
    tensors = [entry for entry in inner if isinstance(entry, TensorEntry)]
    values = [entry for entry in inner if isinstance(entry, ObjectEntry)]
    return ObjectEntry(flat_name(path), path, nest_state(tensors, values))
