"""``metadata.pkl`` of torch_checkpointing 0.1.1: the sharding that files do not say themselves.

It is a pickle of plain containers: ``{version, world_size, metadata: {item: {
nested_path_to_metadata: {json path: [{sharding_metadata, ranks}]}, rank_to_layout_info}}}``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ckptool.core.box import row_major_strides
from ckptool.core.mesh import Mesh
from ckptool.errors import Damaged, coded
from ckptool.serialization.archive.dtensor import DTensorShare, make_placement, read_flat_ints
from ckptool.serialization.archive.tensors import Storage, StoredTensor, read_natural, read_sizes
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.safetensors import read_safetensors
from ckptool.serialization.safetensors_header import StoredSlice
from ckptool.serialization.source import Source, read_metadata
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, ShareLeaf

METADATA = "metadata.pkl"
_SHARD = re.compile(r"([^/]+)_([0-9]{1,9})\.safetensors")
"""In the folder itself: those of a run's steps below it have a ``metadata.pkl`` each."""


def is_uncommitted(source: Source) -> bool:
    """Return whether each rank has a safetensors and a JSON file, without ``metadata.pkl``."""
    shards = [match for match in map(_SHARD.fullmatch, source.files) if match]
    ranks = sorted({int(match[2]) for match in shards})
    if METADATA in source.files or len(ranks) < 2 or ranks != list(range(len(ranks))):
        return False
    values = {name.removesuffix("_0.json") for name in source.files if name.endswith("_0.json")}
    return any(all(f"{item}_{rank}.json" in source.files for rank in ranks) for item in values)


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What is raised where a record lacks something, or has it in another form."""


class Declared(Struct, frozen=True):
    """What ``metadata.pkl`` declares: world size, and sharding records by item, path and rank."""

    world_size: int
    items: Mapping[str, Mapping[tuple[Any, ...], Mapping[int, Mapping[str, Any]]]]


def read_declared(source: Source) -> Declared | None:
    """Read the declarations; None if the folder has none of this kind."""
    if METADATA not in source.files:
        return None
    with coded("metadata-unreadable", file=METADATA):
        value: Any = read_pickle(read_metadata(source, METADATA), what=METADATA).value
        try:
            items = {str(item): _by_path(entry) for item, entry in value["metadata"].items()}
            return Declared(read_natural(value["world_size"]), items)
        except _MALFORMED:
            raise Damaged(f"{METADATA}: not as torch_checkpointing writes it") from None


def _by_path(entry: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[int, Mapping[str, Any]]]:
    paths = entry["nested_path_to_metadata"]
    if isinstance(paths, str):
        raise TypeError("nested_path_to_metadata is text")
    by_path: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for path, records in paths.items():
        by_rank = by_path.setdefault(tuple(json.loads(path)), {})
        for record in records:
            for rank in record["ranks"]:
                by_rank[int(rank)] = record["sharding_metadata"]
    return by_path


def safetensors_leaves(
    source: Source, file: str, item: str, rank: int, declared: Declared
) -> dict[str, Leaf]:
    """Read the tensors of one rank's safetensors file, sharded as the metadata declares."""
    records = declared.items.get(item, {})
    by_name = {".".join(map(str, path)): (path, ranks) for path, ranks in records.items()}
    leaves = {}
    for name, stored in read_safetensors(source, file).tensors.items():
        path, ranks = by_name.get(name, ((name,), {}))
        leaves[name] = Leaf(path, _leaf(stored, ranks.get(rank), rank))
    return leaves


def _leaf(
    stored: StoredSlice, record: Mapping[str, Any] | None, rank: int
) -> PlainLeaf | ShareLeaf:
    local = _stored_tensor(stored)
    if record is None:
        return PlainLeaf(stored.at, local)
    try:
        if record["type"] != "DTensorShardingMetadata":
            return PlainLeaf(stored.at, local)
        return ShareLeaf(_share(stored, local, record["data"], rank), (stored.at,))
    except Damaged as error:
        message = f"{METADATA}: {error.message}"
        raise Damaged(message, "dtensor-contradiction", file=METADATA) from None
    except _MALFORMED:
        message = f"{METADATA}: a sharding record that is not as it should be"
        raise Damaged(message, "dtensor-contradiction", file=METADATA) from None


def _share(
    stored: StoredSlice, local: StoredTensor, data: Mapping[str, Any], rank: int
) -> DTensorShare:
    mesh = data["mesh_spec"]
    names = mesh.get("mesh_dim_names")
    return DTensorShare(
        stored.dtype,
        read_sizes(data["global_shape"]),
        local,
        Mesh(
            read_sizes(mesh["mesh_shape"]),
            tuple(names) if names else None,
            read_flat_ints(mesh["mesh_data"]),
        ),
        tuple(make_placement(item["type"], item) for item in data["placements"]),
        rank,
        None,
    )


def _stored_tensor(stored: StoredSlice) -> StoredTensor:
    storage = Storage("", stored.dtype, math.prod(stored.shape))
    return StoredTensor(storage, stored.dtype, stored.shape, row_major_strides(stored.shape, 1), 0)
