"""The sharding records in torch_checkpointing's ``metadata.pkl`` (0.1.1): where tensors belong.

``DTensorShardingMetadata`` has a mesh and placements, ``default_tensor_v1`` each rank's shards. A
record that says more than these, or has another type, stops the tensor: what it says is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import flat_name
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.mesh import Mesh, Replicate
from ckptool.core.sharding.dtensor import SHARD_ATTRIBUTES
from ckptool.errors import Damaged, Refusal, Unsupported
from ckptool.formats.rank_files.torch_checkpointing import MALFORMED, METADATA, Item
from ckptool.serialization.archive.dtensor import (
    DeclaredShare,
    DTensorShare,
    make_placement,
    read_declared_share,
)
from ckptool.serialization.archive.fields import read_flat_ints, read_name, require_known
from ckptool.serialization.archive.tensors import StoredTensor, describe, read_sizes
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, ShareLeaf
from ckptool.serialization.state_dict.values import refuse_unread

_Fields = Mapping[str, Any]
_DTENSOR = {"global_shape", "dtype", "stride", "mesh_spec", "placements"}
_MESH = {"device_type", "mesh_shape", "mesh_data", "mesh_dim_names"}
_DECLARED = {*SHARD_ATTRIBUTES, "dtype"}


def place_leaves(
    leaves: Mapping[str, Leaf], item: Item, rank: int, *, keeps_whole: bool
) -> dict[str, Leaf]:
    """Return the values of one rank's file, its plain tensors placed as the item's records say.

    Tensors that say themselves where they belong stay as they are, and with ``keeps_whole`` those
    that each rank has whole. One whose record is not understood, or contradicts it, is a
    ``Refusal``.
    """
    records = {flat_name(path): by_rank for path, by_rank in item.records.items()}
    placed = dict(leaves)
    for name, leaf in leaves.items():
        by_rank = records.get(flat_name(leaf.path))
        if by_rank and isinstance(leaf.value, PlainLeaf):
            value = _place(name, leaf, by_rank.get(rank), rank)
            placed[name] = leaf if keeps_whole and _is_whole(value, leaf.value.shape) else value
    return placed


def _place(name: str, leaf: Leaf, record: _Fields | None, rank: int) -> Leaf:
    value: PlainLeaf = leaf.value
    try:
        if record is None:
            raise Unsupported(f"no place for what rank {rank} holds")
        share = _read_share(value.tensor, record, rank)
    except Unsupported as error:
        why = refuse_unread(name, f"{METADATA} says {error.message}")
    except (Damaged, *MALFORMED) as error:
        reason = error.message if isinstance(error, Damaged) else "a malformed sharding record"
        code = "dtensor-contradiction"
        why = Refusal(f"{name}: {METADATA}: {reason}", code, file=METADATA, tensor=name)
    else:
        placed = ShareLeaf(share, (value.place,), value.attributes)
        return Leaf(leaf.path, placed, leaf.rank_state, leaf.note)
    return Leaf(leaf.path, why, leaf.rank_state)


def _is_whole(leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Return whether a leaf is a tensor of this shape that each rank has whole."""
    share = leaf.value.share if isinstance(leaf.value, ShareLeaf) else None
    placements = share.placements if isinstance(share, DTensorShare) else (None,)
    is_replicated = all(isinstance(item, Replicate) for item in placements)
    return share is not None and is_replicated and share.shape == shape


def _read_share(tensor: StoredTensor, record: _Fields, rank: int) -> DTensorShare | DeclaredShare:
    """Read a record."""
    read = _READERS.get(record["type"])
    if read is None:
        raise Unsupported(f"where it belongs by a record of type {describe(record['type'])}")
    share = read(tensor, record["data"], rank)
    if share.dtype != tensor.dtype:
        raise Damaged(f"rank {rank} has {tensor.dtype}, its record {share.dtype}")
    return share


def _read_dtensor(tensor: StoredTensor, data: _Fields, rank: int) -> DTensorShare:
    require_known(data, _DTENSOR, "a DTensor's record")
    kinds = [read_name(item["type"]) for item in data["placements"]]
    rest = [{k: v for k, v in item.items() if k != "type"} for item in data["placements"]]
    placements = tuple(map(make_placement, kinds, rest))
    mesh = _read_mesh(data["mesh_spec"])
    if len(placements) != len(mesh.shape):
        raise Damaged(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dims")
    dtype, shape = _read_dtype(data["dtype"]), read_sizes(data["global_shape"])
    return DTensorShare(dtype, shape, tensor, mesh, placements, rank, None)


def _read_mesh(spec: _Fields) -> Mesh:
    require_known(spec, _MESH, "a device mesh")
    shape, ranks = read_sizes(spec["mesh_shape"]), read_flat_ints(spec["mesh_data"])
    if math.prod(shape) != len(ranks) or len({*ranks}) != len(ranks):
        raise Damaged(f"a mesh of shape {list(shape)} with the ranks {list(ranks)}")
    names = spec.get("mesh_dim_names")
    return Mesh(shape, tuple(map(read_name, names)) if names else None, ranks)


def _read_declared(tensor: StoredTensor, data: _Fields, rank: int) -> DeclaredShare:
    require_known(data, _DECLARED, "a tensor's record")
    share = read_declared_share(data, tensor)
    if share is None:
        raise KeyError(f"one of {SHARD_ATTRIBUTES}")
    return replace(share, dtype=_read_dtype(data["dtype"]))


_Reader = Callable[[StoredTensor, _Fields, int], DTensorShare | DeclaredShare]
_READERS: dict[object, _Reader] = {
    "DTensorShardingMetadata": _read_dtensor,
    "default_tensor_v1": _read_declared,
}


def _read_dtype(text: Any) -> DType:
    name = read_name(text).removeprefix("torch.")
    if name not in BY_NAME:
        raise Unsupported(f"that its element type is {text!r}")
    return BY_NAME[name]
