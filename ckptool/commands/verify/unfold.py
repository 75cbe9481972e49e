"""Values that one checkpoint holds in one piece, and another under a name for each part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry


@dataclass(frozen=True, slots=True)
class Unfolded:
    """A catalog with values taken apart; ``origins`` are the values that its values come from."""

    catalog: Catalog
    origins: dict[str, str]

    def whole(self, names: Collection[str | None]) -> int:
        """How many of the values have all their parts among these names."""
        return len(
            {*self.origins.values()} - {o for n, o in self.origins.items() if n not in names}
        )


def unfolded(catalog: Catalog, other: Catalog) -> Unfolded:
    """Take dicts and lists apart where the other one has names inside of them."""
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
    if name not in heads or not isinstance(value, dict | list | tuple) or not value:
        yield name, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield from _parts(f"{name}.{key}", inner, heads)
