"""The files of torch_checkpointing's items: where metadata says they are, and what is in them.

``rank_to_layout_info`` names a rank's file and the class that serialized it; None is the default,
``ITEM_{rank}.pt`` by torch.save. JSON files hold any value, raw ones bytes (0.1.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptool.core.box import row_major_strides
from ckptool.core.catalog import flat_name
from ckptool.core.text import list_some
from ckptool.errors import Damaged, Problem, SourceError, Unsupported
from ckptool.formats.rank_files.names import RankFile, missing_ranks
from ckptool.formats.rank_files.sharding_records import place_leaves
from ckptool.formats.rank_files.torch_checkpointing import (
    METADATA,
    TORCH,
    Declared,
    Item,
    Layout,
    read_declared,
)
from ckptool.serialization.archive.tensors import Storage, StoredTensor
from ckptool.serialization.safetensors import read_safetensors
from ckptool.serialization.safetensors_header import StoredSlice
from ckptool.serialization.source import Source, read_metadata, require_rank
from ckptool.serialization.state_dict.alike import AlikeFiles
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf
from ckptool.serialization.state_dict.values import refuse_unread

_SUFFIXES = {".json": "JsonSerialization", ".safetensors": "SafetensorsSerialization"}


def names_files(source: Source) -> bool:
    """Return whether metadata names a file that is there, whatever it is called."""
    try:
        declared = read_declared(source)
    except (SourceError, Unsupported):
        return False
    items = declared.items.values() if declared is not None else ()
    layouts = (layout for item in items for layout in item.layouts.values())
    return any(layout is not None and layout.file in source.files for layout in layouts)


def add_declared_files(
    source: Source, declared: Declared, rank_files: Sequence[RankFile]
) -> list[RankFile]:
    """Return the rank files with those that metadata names; Damaged if two are one file."""
    files_by_key = {(item.family, item.rank): item for item in rank_files}
    files: dict[str, RankFile] = {}
    for family, item in declared.items.items():
        for rank in _ranks_of(item):
            require_rank(rank, family)
            file = _file_of(family, rank, item.layouts.get(rank), files_by_key)
            if files.setdefault(file.file, file) is not file:
                message = f"{METADATA}: {file.file} is the file of several items or ranks"
                raise Damaged(message, "metadata-unreadable", file=METADATA)
    present_files = [item for file, item in files.items() if file in source.files]
    return [*present_files, *(item for item in rank_files if item.file not in files)]


def _ranks_of(item: Item) -> list[int]:
    return sorted({*item.layouts, *(rank for records in item.records.values() for rank in records)})


def _file_of(
    family: str, rank: int, layout: Layout | None, files: Mapping[tuple[str, int], RankFile]
) -> RankFile:
    if layout is not None:
        return RankFile(layout.file, family, rank, None, True, layout.serialization)
    return files.get((family, rank)) or RankFile(f"{family}_{rank}.pt", family, rank, None, True)


def missing_files(
    source: Source, files: Sequence[RankFile], declared: Declared
) -> Iterator[Problem]:
    """Yield what is missing of the items: files that metadata names, or of ranks without any."""
    layouts_by_item = {
        name: [layout for layout in item.layouts.values() if layout is not None]
        for name, item in declared.items.items()
    }
    families = {item.family for item in files}
    by_rank = [item for item in files if not layouts_by_item.get(item.family)]
    yield from missing_ranks(by_rank, declared.world_size)
    for name, layouts in layouts_by_item.items():
        missing = [layout.file for layout in layouts if layout.file not in source.files]
        if not layouts and name not in families:
            missing = [f"{name}_{rank}.pt" for rank in _ranks_of(declared.items[name])]
        if missing:
            message = (
                f"{name}: {METADATA} declares it, but its files are missing: {list_some(missing)}"
            )
            yield Problem(message, "rank-missing", file=missing[0])


def missing_tensors(
    declared: Declared, families: Mapping[str, Sequence[tuple[int, Mapping[str, Leaf]]]]
) -> Iterator[Problem]:
    """Yield the tensors that metadata declares and no file holds."""
    for name, item in declared.items.items():
        of_ranks = families.get(name, ())
        if not of_ranks or not all(leaves for _, leaves in of_ranks):
            continue
        names = {flat_name(leaf.path) for _, leaves in of_ranks for leaf in leaves.values()}
        for path in map(flat_name, item.records):
            if path not in names:
                full = f"{name}.{path}"
                message = f"{full}: {METADATA} declares it, but no file holds it"
                yield Problem(message, "data-missing", tensor=full)


def read_item_file(
    source: Source, file: RankFile, declared: Declared | None, archives: AlikeFiles, state: bool
) -> dict[str, Leaf]:
    """Return the named values of a rank's file, its tensors placed as metadata declares."""
    item = declared.items.get(file.family, Item()) if declared is not None else Item()
    suffix = f".{file.file.rpartition('.')[2]}"
    kind = file.serialization or _SUFFIXES.get(suffix, TORCH)
    if kind == TORCH:
        leaves = archives.read(file.file, rank_state=state)
    elif kind == "SafetensorsSerialization":
        leaves = _read_safetensors(source, file.file, item)
    elif kind == "JsonSerialization":
        leaves = _read_json(source, file.file)
    elif kind == "RawSerialization":
        leaves = _whole(read_metadata(source, file.file))
    else:
        return _whole(refuse_unread(file.family, f"{METADATA} says {kind!r} serialized it"))
    if not item.records:
        return leaves
    return place_leaves(leaves, item, file.rank, keeps_whole=kind == TORCH)


def _whole(value: Any) -> dict[str, Leaf]:
    return {"value": Leaf((), value)}


def _read_json(source: Source, file: str) -> dict[str, Leaf]:
    try:
        content = json.loads(read_metadata(source, file))
    except (ValueError, RecursionError):
        raise Damaged(f"{file}: not JSON", "metadata-unreadable", file=file) from None
    if not isinstance(content, dict) or not content:
        return _whole(content)
    return {name: Leaf((name,), value) for name, value in content.items()}


def _read_safetensors(source: Source, file: str, item: Item) -> dict[str, Leaf]:
    """Read a rank's safetensors file, whose names are paths joined by dots."""
    paths = {flat_name(path): path for path in item.records}
    tensors = read_safetensors(source, file).tensors
    return {
        name: Leaf(paths.get(name, (name,)), PlainLeaf(stored.at, _stored_tensor(stored)))
        for name, stored in tensors.items()
    }


def _stored_tensor(stored: StoredSlice) -> StoredTensor:
    storage = Storage("", stored.dtype, math.prod(stored.shape))
    return StoredTensor(storage, stored.dtype, stored.shape, row_major_strides(stored.shape, 1), 0)
