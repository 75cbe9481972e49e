"""``metadata.pkl`` of torch_checkpointing 0.1.1: the sharding, and the files, of each item.

It is a pickle of plain containers: ``{version, world_size, metadata: {item: {
nested_path_to_metadata: {json path: [{sharding_metadata, ranks}]}, rank_to_layout_info}}}``.
Version 1.0 has the item as the first step of each path, and ``rank_to_layout_info_mappings`` of
ranks and items beside it. An item without sharding records is not in it.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from ckptool.core.catalog import Path
from ckptool.errors import Damaged, Unsupported, coded, naming
from ckptool.serialization.archive.tensors import describe, read_natural
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.source import Source, read_metadata

METADATA = "metadata.pkl"
_SHARD = re.compile(r"([^/]+)_([0-9]{1,9})\.safetensors")
"""In the folder itself: those of a run's steps below it have a ``metadata.pkl`` each."""
TORCH = "TorchSerialization"
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What is raised where a record lacks something, or has it in another form."""


def is_uncommitted(source: Source) -> bool:
    """Return whether each rank has a safetensors and a JSON file, without ``metadata.pkl``."""
    shards = [match for match in map(_SHARD.fullmatch, source.files) if match]
    ranks = sorted({int(match[2]) for match in shards})
    if METADATA in source.files or len(ranks) < 2 or ranks != list(range(len(ranks))):
        return False
    values = {name.removesuffix("_0.json") for name in source.files if name.endswith("_0.json")}
    return any(all(f"{item}_{rank}.json" in source.files for rank in ranks) for item in values)


class Layout(Struct, frozen=True):
    """Where a rank's part of an item is, and the class of its serialization."""

    file: str
    serialization: str


class Item(Struct):
    """What is declared of an item: sharding records by path and rank, and the ranks' layouts.

    A layout is None where it is the default one.
    """

    records: dict[Path, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    layouts: dict[int, Layout | None] = field(default_factory=dict)


class Declared(Struct, frozen=True):
    """What ``metadata.pkl`` declares."""

    world_size: int
    items: Mapping[str, Item]


def read_declared(source: Source) -> Declared | None:
    """Read the declarations; None if the folder has none of this kind.

    Raises Damaged if they are malformed, Unsupported for an unknown version.
    """
    if METADATA not in source.files:
        return None
    with coded("metadata-unreadable", file=METADATA), naming(METADATA):
        value: Any = read_pickle(read_metadata(source, METADATA), what=METADATA).value
        try:
            version = value.get("version", "1.0")
            if version not in ("1.0", "2.0"):
                raise Unsupported(f"{METADATA}: version {describe(version)} is not known")
            items = _read_items(value) if version == "2.0" else _read_first_items(value)
            return Declared(read_natural(value["world_size"]), items)
        except MALFORMED:
            raise Damaged(f"{METADATA}: not as torch_checkpointing writes it") from None


def _read_items(value: Mapping[str, Any]) -> dict[str, Item]:
    items = {}
    for name, entry in value["metadata"].items():
        items[str(name)] = item = Item()
        for path, groups in _items_of(entry["nested_path_to_metadata"]):
            _add_records(item, path, groups)
        _add_layouts(item, entry["rank_to_layout_info"])
    return items


def _read_first_items(value: Mapping[str, Any]) -> dict[str, Item]:
    """Read version 1.0."""
    items: dict[str, Item] = {}
    for (name, *path), groups in _items_of(value["metadata"]):
        _add_records(items.setdefault(str(name), Item()), tuple(path), groups)
    for name, item in items.items():
        mappings = value["rank_to_layout_info_mappings"].items()
        _add_layouts(item, {rank: of_rank.get(name) for rank, of_rank in mappings})
    return items


def _items_of(by_path: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    for text, groups in by_path.items():
        path = json.loads(text)
        if not isinstance(path, list):
            raise TypeError(text)
        yield tuple(path), groups


def _add_records(item: Item, path: Path, groups: Iterable[Mapping[str, Any]]) -> None:
    by_rank = item.records.setdefault(path, {})
    for group in groups:
        record = group["sharding_metadata"]
        for rank in map(read_natural, group["ranks"]):
            if by_rank.setdefault(rank, record) != record:
                raise ValueError(f"two records of rank {rank}")


def _add_layouts(item: Item, layouts: Mapping[Any, Any]) -> None:
    for rank, layout in layouts.items():
        number = int(rank)
        item.layouts[number] = None if layout is None else _read_layout(layout)


def _read_layout(layout: Mapping[str, Any]) -> Layout:
    file, kind = layout["file_path"], layout["serialization_format"]["type"]
    if not isinstance(file, str) or not isinstance(kind, str):
        raise TypeError("a layout without a file")
    return Layout(posixpath.normpath(file), kind)
