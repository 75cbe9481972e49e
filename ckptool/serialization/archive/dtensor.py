"""One rank's share of a tensor as torch pickles it, and the whole that it is part of.

Verified with files: DTensors and ShardedTensors of torch 2.1, 2.4 and 2.13, tensors whose
attributes declare their shards of torch 2.15. A DTensor's device mesh is recorded as a tensor of
ranks (torch 2.1 to 2.9), or as a layout and a rank map (2.10 to 2.13).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from msgspec import Struct

from ckptool.core.box import Box, Piece
from ckptool.core.catalog import Extent
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh, Partial, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import SHARD_ATTRIBUTES, declared_pieces
from ckptool.errors import UNREAD, Damaged, Unsupported
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import (
    SUBCLASS,
    StoredTensor,
    describe,
    is_tensor_record,
    list_wrapped,
    locate_tensor,
    read_dtype,
    read_natural,
    read_sizes,
    read_tensor,
    require_outer,
)
from ckptool.serialization.pickle.records import Call, Global, PickleValue, state_fields
from ckptool.serialization.source import Source


class DTensorShare(Struct, frozen=True):
    """One rank's part of a DTensor. ``rank`` is the rank that pickled it, if recorded."""

    dtype: DType
    shape: tuple[int, ...]
    local: StoredTensor
    mesh: Mesh
    placements: tuple[Placement, ...]
    rank: int | None
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None

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
_LAYOUT_FIELDS = ("axes", "shape", "stride")
"""The fields of placements, a DTensor's spec and a mesh's layout (torch 2.1 to 2.15)."""


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
    mesh, rank = _mesh_of(spec.get("mesh"), file, source)
    placements = tuple(map(read_placement, spec.get("placements") or ()))
    if len(placements) != len(mesh.shape):
        raise Damaged(
            f"{file.what}: a DTensor has {len(placements)} placements on a mesh of"
            f" {len(mesh.shape)} dims"
        )
    dtype, shape = read_dtype(arguments[1]), read_sizes(arguments[2])
    order = _shard_order(spec.get("shard_order"))
    return DTensorShare(dtype, shape, local, mesh, placements, rank, order)


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


def require_known(fields: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise Unsupported for a field of a record that is not known."""
    more = [name for name in fields if name not in known]
    if more:
        raise Unsupported(f"{what} with {describe(more[0])}, which is not known", UNREAD)


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


_MOST_RANKS = 1 << 18


def _mesh_of(record: Any, file: TorchFile, source: Source) -> tuple[Mesh, int | None]:
    """Return the mesh, and the rank that pickled it if recorded."""
    fields = read_fields(record, "DeviceMesh")
    if record not in file.meshes:
        file.meshes[record] = read_mesh(fields, file, source)
    return file.meshes[record]


def read_mesh(fields: dict[str, Any], file: TorchFile, source: Source) -> tuple[Mesh, int | None]:
    """Read the mesh of a record with these attributes, and the rank that pickled it."""
    names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
    names = tuple(map(read_name, names)) if names else None
    coordinate = fields.get("_coordinate_on_dim")
    at = read_sizes(coordinate) if isinstance(coordinate, tuple | list) else None
    if "mesh" not in fields:
        return _mesh_of_layout(fields, names, at, file, source)
    shape, ranks = _ints(fields.get("mesh"), file, source)
    mesh = Mesh(shape, names, ranks)
    return mesh, next((rank for rank in ranks if mesh.coordinate(rank) == at), None)


def _mesh_of_layout(
    fields: dict[str, Any],
    names: tuple[str, ...] | None,
    at: tuple[int, ...] | None,
    file: TorchFile,
    source: Source,
) -> tuple[Mesh, int | None]:
    """Read a mesh by layout and rank map, as torch 2.10 to 2.13 records it."""
    flat = fields.get("_flatten_rank_map")
    if flat is None:
        _, ranks = _ints(fields["_rank_map"], file, source)
    else:
        ranks = read_flat_ints(flat)
    axes = _axes(fields["_layout"], len(ranks))
    shape = tuple(map(len, axes))
    offsets = [sum(steps) for steps in itertools.product(*axes)]
    rank = fields.get("_rank")
    base = 0
    if len(offsets) < len(ranks):
        if not isinstance(rank, int) or at is None or len(at) != len(axes) or rank not in ranks:
            raise Damaged(f"{file.what}: a sub-mesh that does not record which rank pickled it")
        base = ranks.index(rank) - sum(axis[i] for axis, i in zip(axes, at, strict=True))
    if base < 0 or base + max(offsets) >= len(ranks):
        raise Damaged(f"{file.what}: a mesh layout outside its {len(ranks)} ranks")
    members = tuple(ranks[base + offset] for offset in offsets)
    return Mesh(shape, names, members), rank if isinstance(rank, int) else None


def _axes(layout: PickleValue, ranks: int) -> list[list[int]]:
    """Return for each mesh dim the offsets into the map of ``ranks`` ranks along it."""
    fields = read_fields(layout, "_MeshLayout", _LAYOUT_FIELDS)
    if "axes" in fields:
        records = [read_fields(axis, "_FlatLayout", _LAYOUT_FIELDS) for axis in fields["axes"]]
        pairs = [(axis["shape"], axis["stride"]) for axis in records]
    elif isinstance(fields["shape"], int):
        pairs = [(fields["shape"], fields["stride"])]
    else:
        pairs = list(zip(fields["shape"], fields["stride"], strict=True))
    flat_pairs = [(read_flat_ints(shape), read_flat_ints(stride)) for shape, stride in pairs]
    if math.prod(math.prod(shape) for shape, _ in flat_pairs) > ranks:
        raise Damaged(f"a mesh layout of more than its {ranks:,} ranks")
    return [_offsets(shape, stride) for shape, stride in flat_pairs]


def read_flat_ints(value: PickleValue) -> tuple[int, ...]:
    """Return the ints of a nested tuple, in order; Damaged if there are too many."""
    ints: list[int] = []
    stack = [value]
    left = _MOST_RANKS
    while stack:
        item = stack.pop()
        left -= 1
        if isinstance(item, tuple | list):
            left -= len(item)
            stack += reversed(item)
        else:
            ints.append(read_natural(item))
        if left < 0:
            raise Damaged(f"a mesh of more than {_MOST_RANKS:,} ranks")
    return tuple(ints)


def _offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    steps = [[i * s for i in range(n)] for n, s in zip(shape, stride, strict=True)]
    return [sum(step) for step in itertools.product(*steps)]


def _ints(
    value: PickleValue, file: TorchFile, source: Source
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read shape and values, row-major, of the small integer tensor of ranks of an older mesh."""
    tensor = read_tensor(value)
    if tensor is None or tensor.dtype.kind != "int" or len(tensor.shape) > 8:
        raise Damaged(f"{file.what}: a device mesh without its ranks")
    place = locate_tensor(tensor, file)
    if not isinstance(place, Extent) or math.prod(tensor.shape) > _MOST_RANKS:
        raise Damaged(f"{file.what}: a device mesh of {list(tensor.shape)} in {place.file}")
    itemsize = tensor.dtype.itemsize
    data = source.read(place.file, place.offset, tensor.storage.nbytes - tensor.offset * itemsize)
    starts = _offsets(tensor.shape, place.strides)
    order: Literal["little", "big"] = "big" if "byteswap" in place.ops else "little"
    pieces = (data[start : start + itemsize] for start in starts)
    return tensor.shape, tuple(int.from_bytes(piece, order, signed=True) for piece in pieces)


def read_name(value: PickleValue) -> str:
    """Return a name of a pickle; Damaged if it is something else."""
    if not isinstance(value, str):
        raise Damaged(f"expected a name, got {describe(value)}")
    return value


def read_fields(
    value: PickleValue, expected: str, known: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the attributes of a record; Damaged if it is none.

    Raises Unsupported for one that is not among those ``known``.
    """
    if not isinstance(value, Call):
        raise Damaged(f"expected a {expected} record, got {type(value).__name__}")
    if known is not None:
        require_known(value.fields, known, f"a {expected} record")
    return value.fields
