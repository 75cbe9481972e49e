"""One rank's share of a tensor as torch pickles it, and the whole that it is part of.

DTensors and ShardedTensors were read from files by torch 2.1, 2.4 and 2.13, whose mesh records
differ; tensors whose attributes declare their shards from files by torch 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.core.box import Box
from ckptool.core.declared_shards import SHARD_ATTRIBUTES, declared_pieces
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh, Partial, Placement, Replicate, Shard, StridedShard
from ckptool.core.shards import Piece
from ckptool.errors import Damaged
from ckptool.formats._mesh_records import as_text, call_fields, mesh_of
from ckptool.formats._pickle import Call, Global
from ckptool.formats._storage import (
    StoredTensor,
    attributes_of,
    dtype_of,
    natural,
    plain_tensor,
    shown,
    sizes,
    unwrapped,
)
from ckptool.formats._subclasses import is_tensor_record
from ckptool.formats._torch_file import TorchFile
from ckptool.formats.base import Source


@dataclass(frozen=True, slots=True)
class DTensorShare:
    """One rank's part of a DTensor. ``rank`` is the rank that pickled it, where it says so."""

    dtype: DType
    shape: tuple[int, ...]
    local: StoredTensor
    mesh: Mesh
    placements: tuple[Placement, ...]
    rank: int | None
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None


@dataclass(frozen=True, slots=True)
class ShardedShare:
    """One rank's part of a ShardedTensor: its own boxes, and every rank's."""

    dtype: DType
    shape: tuple[int, ...]
    local: tuple[tuple[Box, StoredTensor], ...]
    boxes: tuple[tuple[Box, int | None], ...]
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class DeclaredShare:
    """One rank's part of a tensor whose attributes say which boxes of the whole it holds."""

    dtype: DType
    shape: tuple[int, ...]
    local: StoredTensor
    pieces: tuple[Piece, ...]
    rank: None = None


OF_DTENSORS = ("_local_tensor", "_spec")
"""The attributes that make a DTensor."""
Share = DTensorShare | ShardedShare | DeclaredShare


def declared_share(value: Any, tensor: StoredTensor) -> DeclaredShare | None:
    """Return the share that a plain tensor's attributes declare, or None where they do not.

    Raises Damaged where they contradict one another.
    """
    attributes = attributes_of(value)
    if not attributes.keys() >= {*SHARD_ATTRIBUTES}:
        return None
    shape, *lists = (attributes[name] for name in SHARD_ATTRIBUTES)
    whole = sizes(shape)
    try:
        above, inside, lengths = (tuple(map(sizes, one)) for one in lists)
        pieces = declared_pieces(whole, above, inside, lengths, tensor.shape)
    except (TypeError, ValueError) as error:
        names = ", ".join(SHARD_ATTRIBUTES)
        raise Damaged(f"attributes {names} that contradict one another: {error}") from None
    return DeclaredShare(tensor.dtype, whole, tensor, pieces)


def sharded_share(
    value: Any, file: TorchFile, source: Source
) -> DTensorShare | ShardedShare | None:
    """The share that a pickled tensor subclass describes, or None where it is something else.

    None too of a DTensor whose local tensors are of a kind that is not read.
    """
    value = unwrapped(value)
    if not isinstance(value, Call) or len(value.args) != 4:
        return None
    if value.name != "torch._tensor._rebuild_from_type_v2":
        return None
    cls, arguments, state = value.args[1:]
    if not isinstance(cls, Global) or not isinstance(arguments, tuple) or len(arguments) < 3:
        return None
    if cls.name == "DTensor" and cls.module.startswith("torch.distributed."):
        local = _fields(state).get("_local_tensor")
        if is_tensor_record(local) and plain_tensor(local) is None:
            return None
        return _dtensor(arguments, state, file, source)
    if cls.name == "ShardedTensor" and cls.module.startswith("torch.distributed._shard."):
        return _sharded_tensor(arguments, state)
    return None


def _dtensor(
    arguments: tuple[Any, ...], state: Any, file: TorchFile, source: Source
) -> DTensorShare:
    fields = _fields(state)
    local = plain_tensor(fields.get("_local_tensor"))
    spec = call_fields(fields.get("_spec"), "DTensorSpec")
    if local is None:
        raise Damaged(f"{file.what}: a DTensor whose local tensor is no plain tensor")
    mesh, rank = mesh_of(spec.get("mesh"), file, source)
    placements = tuple(map(placement, spec.get("placements") or ()))
    if len(placements) != len(mesh.shape):
        raise Damaged(
            f"{file.what}: a DTensor has {len(placements)} placements on a mesh of"
            f" {len(mesh.shape)} dims"
        )
    return DTensorShare(
        dtype_of(arguments[1]),
        sizes(arguments[2]),
        local,
        mesh,
        placements,
        rank,
        _shard_order(spec.get("shard_order")),
    )


def placement(value: Any) -> Placement:
    """A pickled placement record."""
    fields = value.fields if isinstance(value, Call) else {}
    name = value.function.name if isinstance(value, Call) and value.is_new else None
    if name == "Shard":
        return Shard(_dim(fields.get("dim")))
    if name == "_StridedShard":
        return StridedShard(_dim(fields.get("dim")), natural(fields.get("split_factor")))
    if name == "Replicate":
        return Replicate()
    if name in ("Partial", "_Partial"):
        return Partial(as_text(fields.get("reduce_op")))
    raise Damaged(f"unknown placement {shown(value) if name is None else name}")


def _dim(value: Any) -> int:
    if type(value) is not int or abs(value) > 64:
        raise Damaged(f"{shown(value)} where a tensor dim is expected")
    return value


def _shard_order(value: Any) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    if not isinstance(value, tuple):
        return None
    entries = [entry.args for entry in value if isinstance(entry, Call) and len(entry.args) == 2]
    return tuple((natural(dim), sizes(mesh_dims)) for dim, mesh_dims in entries)


def _sharded_tensor(arguments: tuple[Any, ...], state: Any) -> ShardedShare:
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise Damaged("a ShardedTensor record without its shards")
    local = []
    for shard in state[0]:
        fields = call_fields(shard, "Shard")
        tensor = plain_tensor(fields.get("tensor"))
        if tensor is None:
            raise Damaged("a ShardedTensor shard that is no plain tensor")
        local.append((_shard_box(fields.get("metadata"))[0], tensor))
    metadata = call_fields(state[1], "ShardedTensorMetadata")
    group = call_fields(state[2], "ProcessGroupState")
    return ShardedShare(
        dtype_of(arguments[1]),
        sizes(arguments[2]),
        tuple(local),
        tuple(_shard_box(shard) for shard in metadata.get("shards_metadata") or ()),
        natural(group.get("global_rank")),
        natural(group.get("global_world_size")),
    )


def _shard_box(value: Any) -> tuple[Box, int | None]:
    fields = call_fields(value, "ShardMetadata")
    where = fields.get("placement")
    rank = where.fields.get("_rank") if isinstance(where, Call) else None
    box = Box.at(sizes(fields.get("shard_offsets")), sizes(fields.get("shard_sizes")))
    return box, rank if isinstance(rank, int) else None


def _fields(state: Any) -> dict[str, Any]:
    parts = state if isinstance(state, tuple) else (state,)
    merged: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            merged.update(part)
    return merged
