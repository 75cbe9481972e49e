"""One rank's share of a tensor as torch pickles it, and the whole that it is part of.

Verified with files: DTensors and ShardedTensors of torch 2.1, 2.4 and 2.13, tensors whose
attributes declare their shards of torch 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct

from ckptool.core.box import Box, Piece
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh, Partial, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import SHARD_ATTRIBUTES, declared_pieces
from ckptool.errors import UNREAD, Damaged, Unsupported
from ckptool.serialization.archive.device_mesh import MeshRecord, read_mesh
from ckptool.serialization.archive.fields import read_fields, read_name, require_known
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import (
    SUBCLASS,
    StoredTensor,
    describe,
    is_tensor_record,
    list_wrapped,
    read_dtype,
    read_natural,
    read_sizes,
    read_tensor,
    require_outer,
    require_unchanged,
)
from ckptool.serialization.pickle.records import Call, Global, PickleValue, state_fields
from ckptool.serialization.source import Source


class DTensorShare(Struct, frozen=True):
    """One rank's part of a DTensor, and how its mesh is recorded.

    ``rank`` is the rank that pickled it, if recorded.
    """

    dtype: DType
    shape: tuple[int, ...]
    local: StoredTensor
    mesh: Mesh
    placements: tuple[Placement, ...]
    rank: int | None
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None
    how: MeshRecord | None = None

    kind: ClassVar = "DTensor"

    @property
    def locals(self) -> list[StoredTensor]:
        """What the rank holds."""
        return [self.local]


class ShardedShare(Struct, frozen=True):
    """One rank's part of a ShardedTensor: its own boxes, and every rank's."""

    dtype: DType
    shape: tuple[int, ...]
    local: tuple[tuple[Box, StoredTensor], ...]
    boxes: tuple[tuple[Box, int | None], ...]
    rank: int
    world_size: int

    kind: ClassVar = "ShardedTensor"

    @property
    def locals(self) -> list[StoredTensor]:
        """What the rank holds, by its boxes."""
        return [tensor for _, tensor in self.local]


class DeclaredShare(Struct, frozen=True):
    """One rank's part of a tensor whose attributes declare its boxes of the whole."""

    dtype: DType
    shape: tuple[int, ...]
    local: StoredTensor
    pieces: tuple[Piece, ...]
    rank: None = None

    kind: ClassVar = "tensor with shards of its own"

    @property
    def locals(self) -> list[StoredTensor]:
        """What the rank holds."""
        return [self.local]


OF_DTENSORS = ("_local_tensor", "_spec")
"""The attributes of a DTensor."""
Share = DTensorShare | ShardedShare | DeclaredShare
_PLACEMENT_FIELDS = {
    "Shard": ("dim",),
    "StridedShard": ("dim", "split_factor"),
    "Replicate": (),
}
_SPEC_FIELDS = (
    "mesh",
    "placements",
    "tensor_meta",
    "shard_order",
    "use_strided_shard_as_shard_order",
    "_hash",
)
"""The fields of placements and of a DTensor's spec (torch 2.1 to 2.15)."""


def read_declared_share(
    attributes: Mapping[str, Any], tensor: StoredTensor
) -> DeclaredShare | None:
    """Return the share that a plain tensor's attributes declare, or None if they do not.

    Raises Damaged if they contradict one another.
    """
    if not attributes.keys() >= {*SHARD_ATTRIBUTES}:
        return None
    shape, *lists = (attributes[name] for name in SHARD_ATTRIBUTES)
    whole = read_sizes(shape)
    try:
        above, inside, lengths = (tuple(map(read_sizes, items)) for items in lists)
        pieces = declared_pieces(whole, above, inside, lengths, tensor.shape)
    except (TypeError, ValueError) as error:
        names = ", ".join(SHARD_ATTRIBUTES)
        raise Damaged(f"attributes {names} that contradict one another: {error}") from None
    return DeclaredShare(tensor.dtype, whole, tensor, pieces)


def read_share(
    value: PickleValue, file: TorchFile, source: Source
) -> DTensorShare | ShardedShare | None:
    """Return the share that a tensor subclass describes, or None for any other.

    Also None for one whose local tensors are of an unsupported kind.
    """
    records = list_wrapped(value)
    require_unchanged(records)
    share = _read_unwrapped(records[-1], file, source)
    if share is not None:
        require_outer(records, share.dtype, share.shape)
    return share


def _read_unwrapped(
    value: PickleValue, file: TorchFile, source: Source
) -> DTensorShare | ShardedShare | None:
    if not isinstance(value, Call) or value.name != SUBCLASS:
        return None
    if len(value.args) != 4:
        return None
    cls, arguments, state = value.args[1:]
    if not isinstance(cls, Global) or not isinstance(arguments, tuple) or len(arguments) < 3:
        return None
    if cls.name == "DTensor" and cls.module.startswith("torch.distributed."):
        local = state_fields(state).get("_local_tensor")
        return None if _is_other_kind(local) else _dtensor(arguments, state, file, source)
    if cls.name == "ShardedTensor" and cls.module.startswith("torch.distributed._shard."):
        return _sharded_tensor(arguments, state)
    return None


def _is_other_kind(value: PickleValue) -> bool:
    """Return whether a value is a tensor's record, but not that of a plain one."""
    return is_tensor_record(value) and read_tensor(value) is None


def _dtensor(
    arguments: tuple[Any, ...], state: PickleValue, file: TorchFile, source: Source
) -> DTensorShare:
    fields = state_fields(state)
    local = read_tensor(fields.get("_local_tensor"))
    spec = read_fields(fields.get("_spec"), "DTensorSpec", _SPEC_FIELDS)
    if local is None:
        raise Damaged(f"{file.what}: a DTensor whose local tensor is not a plain tensor")
    mesh, rank, how = _mesh_of(spec.get("mesh"), file, source)
    placements = tuple(map(read_placement, spec.get("placements") or ()))
    if len(placements) != len(mesh.shape):
        raise Damaged(
            f"{file.what}: a DTensor has {len(placements)} placements on a mesh of"
            f" {len(mesh.shape)} dims"
        )
    dtype, shape = read_dtype(arguments[1]), read_sizes(arguments[2])
    order = _shard_order(spec.get("shard_order"))
    return DTensorShare(dtype, shape, local, mesh, placements, rank, order, how)


def read_placement(value: PickleValue) -> Placement:
    """Read a placement record; Unsupported for an unknown one."""
    if isinstance(value, Call) and value.is_new:
        return make_placement(value.function.name, value.fields)
    raise Damaged(f"unknown placement {describe(value)}")


def make_placement(name: str, fields: Mapping[str, Any]) -> Placement:
    """Return the placement of a class of this name.

    Raises Unsupported for an unknown one, and for a field that may change what it means.
    """
    name = name.removeprefix("_") if name in ("_StridedShard", "_Partial") else name
    require_known(fields, _PLACEMENT_FIELDS.get(name, fields), f"a placement {name}")
    if name == "Shard":
        return Shard(_dim(fields.get("dim")))
    if name == "StridedShard":
        return StridedShard(_dim(fields.get("dim")), read_natural(fields.get("split_factor")))
    if name == "Replicate":
        return Replicate()
    if name == "Partial":
        return Partial(read_name(fields.get("reduce_op")))
    raise Unsupported(f"unknown placement {name}", UNREAD)


def _dim(value: PickleValue) -> int:
    if type(value) is not int or abs(value) > 64:
        raise Damaged(f"expected a tensor dim, got {describe(value)}")
    return value


def _shard_order(value: PickleValue) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    if not isinstance(value, tuple):
        return None
    entries = [entry.args for entry in value if isinstance(entry, Call) and len(entry.args) == 2]
    if len(entries) < len(value):
        raise Damaged("a shard order that is none")
    return tuple((read_natural(dim), read_sizes(mesh_dims)) for dim, mesh_dims in entries)


def _sharded_tensor(arguments: tuple[Any, ...], state: PickleValue) -> ShardedShare | None:
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise Damaged("a ShardedTensor record without its shards")
    local = []
    for shard in state[0]:
        fields = read_fields(shard, "Shard")
        tensor = read_tensor(fields.get("tensor"))
        if _is_other_kind(fields.get("tensor")):
            return None
        if tensor is None:
            raise Damaged("a ShardedTensor shard that is not a plain tensor")
        local.append((_shard_box(fields.get("metadata"))[0], tensor))
    metadata = read_fields(state[1], "ShardedTensorMetadata")
    group = read_fields(state[2], "ProcessGroupState")
    return ShardedShare(
        read_dtype(arguments[1]),
        read_sizes(arguments[2]),
        tuple(local),
        tuple(_shard_box(shard) for shard in metadata.get("shards_metadata") or ()),
        read_natural(group.get("global_rank")),
        read_natural(group.get("global_world_size")),
    )


def _shard_box(value: PickleValue) -> tuple[Box, int | None]:
    fields = read_fields(value, "ShardMetadata")
    where = fields.get("placement")
    rank = where.fields.get("_rank") if isinstance(where, Call) else None
    box = Box.at(read_sizes(fields.get("shard_offsets")), read_sizes(fields.get("shard_sizes")))
    return box, rank if isinstance(rank, int) else None


def _mesh_of(record: Any, file: TorchFile, source: Source) -> tuple[Mesh, int | None, MeshRecord]:
    """Return the mesh, the rank that pickled it if recorded, and how it is recorded."""
    fields = read_fields(record, "DeviceMesh")
    if record not in file.meshes:
        file.meshes[record] = read_mesh(fields, file, source)
    return *file.meshes[record], MeshRecord.of(fields)
