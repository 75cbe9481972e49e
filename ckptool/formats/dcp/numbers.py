"""Keys that were numbers: DCP makes text of all keys, and torch's optimizers look for numbers.

An optimizer that was saved by its own ``state_dict()`` numbers its parameters, and its groups list
these numbers as they were. With text for keys, ``load_state_dict`` finds no parameter's state and
starts anew without a word (torch 2.13).
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, Path
from ckptool.core.selection import AnyEntry, entries_of, with_entries

_Numbers = dict[Path, dict[str, int]]


def number_states(catalog: Catalog) -> Catalog:
    """Return the catalog with numbers in the paths of the states of numbered parameters."""
    numbers = _listed_numbers(catalog)
    if not numbers:
        return catalog
    return with_entries(catalog, (_numbered(entry, numbers) for entry in entries_of(catalog)))


def _listed_numbers(catalog: Catalog) -> _Numbers:
    """Return, by the path of each optimizer's states, the numbers that its groups list."""
    numbers: _Numbers = defaultdict(dict)
    for entry in catalog.objects.values():
        *head, groups, position, last = ("", "", "", *entry.path)
        is_group = (groups, last) == ("param_groups", "params") and isinstance(position, Index)
        if is_group and isinstance(entry.value, list):
            known = numbers[(*head[3:], "state")]
            known |= {str(number): number for number in entry.value if type(number) is int}
    return numbers


def _numbered(entry: AnyEntry, numbers: _Numbers) -> AnyEntry:
    path = entry.path
    for at, step in enumerate(path[1:], 1):
        if path[at - 1] == "state" and (known := numbers.get(path[:at])):
            return replace(entry, path=(*path[:at], known.get(str(step), step), *path[at + 1 :]))
    return entry
