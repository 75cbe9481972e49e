"""How torch pickles a device mesh, which each of three lines of versions does in its own way.

A tensor of ranks (torch 2.1 to 2.9), or a layout and a map of ranks: one shape and stride of all
dims (2.10 to 2.12), or those of each dim by itself (from 2.13 on). Verified with files of torch
2.4, 2.6, 2.9, 2.11, 2.13 and 2.15. No version loads what another line writes.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from operator import mul
from typing import Any

from ckptool.core.box import row_major_strides
from ckptool.core.catalog import Extent
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Literal
from ckptool.core.mesh import Mesh
from ckptool.errors import Damaged
from ckptool.serialization.archive.fields import MOST_RANKS, read_fields, read_flat_ints, read_name
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import locate_tensor, read_sizes, read_tensor
from ckptool.serialization.pickle.records import Call, Global, PickleValue, new_object
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.source import Source

OF_TORCH = "DTensors of torch"
"""The entry of ``Catalog.info`` for how device meshes are recorded."""
_LAYOUT = "torch.distributed._mesh_layout"
_LAYOUT_FIELDS = ("axes", "shape", "stride")


class MeshRecord(Enum):
    """How a device mesh is recorded, by the versions of torch that do so."""

    RANKS = "up to 2.9"
    LAYOUT = "2.10 to 2.12"
    AXES = "2.13 and later"

    @classmethod
    def of(cls, fields: dict[str, Any]) -> MeshRecord:
        """Return how a record with these attributes was made."""
        if "mesh" in fields:
            return cls.RANKS
        return cls.AXES if "axes" in read_fields(fields["_layout"], "_MeshLayout") else cls.LAYOUT

    @classmethod
    def of_torch(cls, version: tuple[int, int]) -> MeshRecord:
        """Return how a version of torch records it."""
        return cls.RANKS if version < (2, 10) else cls.LAYOUT if version < (2, 13) else cls.AXES


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
    """Read a mesh by layout and rank map, as torch records it from 2.10 on."""
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
    if not 0 < math.prod(math.prod(shape) for shape, _ in flat_pairs) <= ranks:
        raise Damaged(f"a mesh layout of no rank, or of more than its {ranks:,}")
    return [_offsets(shape, stride) for shape, stride in flat_pairs]


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
    if not isinstance(place, Extent) or not 0 < math.prod(tensor.shape) <= MOST_RANKS:
        raise Damaged(f"{file.what}: a device mesh of {list(tensor.shape)} in {place.file}")
    itemsize = tensor.dtype.itemsize
    starts = _offsets(tensor.shape, place.strides)
    data = source.read(place.file, place.offset, starts[-1] + itemsize)
    is_big = "byteswap" in place.ops
    pieces = (data[start : start + itemsize] for start in starts)
    values = (int.from_bytes(piece, "big" if is_big else "little", signed=True) for piece in pieces)
    return tensor.shape, tuple(values)


def record_mesh(mesh: Mesh, rank: int, how: MeshRecord) -> Call:
    """Return the record of a root ``DeviceMesh`` on the CPU, as ``rank`` sees it.

    Hashes are left to be recomputed, as torch does if it finds None.
    """
    ranks = struct.pack(f"<{mesh.size}i", *mesh.ranks)
    names, coordinate = _group_names(mesh, rank, how), mesh.coordinate(rank) or ()
    cls = Global("torch.distributed.device_mesh", "DeviceMesh")
    if how is MeshRecord.RANKS:
        groups = zip(names, _groups(mesh, coordinate), strict=True)
        return new_object(
            cls,
            device_type="cpu",
            mesh=TensorRef(BY_NAME["int32"], mesh.shape, Literal(ranks)),
            mesh_dim_names=mesh.names,
            _flatten_mesh_list=mesh.ranks,
            _thread_id=None,
            _dim_group_infos=[(f"ptd:{name}", group, name) for name, group in groups],  # to 2.6
            _dim_group_names=names,  # from 2.7 on
            _coordinate_on_dim=list(coordinate),
            _hash=None,
        )
    return new_object(
        cls,
        _device_type="cpu",
        _layout=_record_layout(mesh, how),
        _rank_map=TensorRef(BY_NAME["int32"], (mesh.size,), Literal(ranks)),
        _mesh_dim_names=mesh.names,
        _root_mesh=None,
        _preserve_rank_order=False,  # torch 2.15 compares it, and has no default for it
        _flatten_rank_map=mesh.ranks,
        _thread_id=None,
        _flatten_mapping={},
        _dim_group_names=names,
        _rank=rank,
        _coordinate_on_dim=coordinate,
        _hash=None,
    )


def _group_names(mesh: Mesh, rank: int, how: MeshRecord) -> list[str]:
    """Return the names of a rank's process groups, one per mesh dim, as torch numbers them.

    ``init_process_group`` creates group 0; ``init_device_mesh`` uses it for a dim of all ranks, of
    no more dims until torch 2.9, and creates for every other dim one group after another, row-major
    over the other dims.
    """
    coordinate = mesh.coordinate(rank) or ()
    takes_first = how is not MeshRecord.RANKS or len(mesh.shape) == 1
    names, first = [], 1
    for dim, size in enumerate(mesh.shape):
        strides = row_major_strides(mesh.shape[:dim] + mesh.shape[dim + 1 :], 1)
        rest = coordinate[:dim] + coordinate[dim + 1 :]
        is_first = takes_first and size == mesh.size
        group = first + sum(at * step for at, step in zip(rest, strides, strict=True))
        names.append("0" if is_first else str(group))
        first += 0 if is_first else mesh.size // size
    return names


def _groups(mesh: Mesh, coordinate: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ranks along each dim of a mesh through a position."""
    strides = row_major_strides(mesh.shape, 1)
    for dim, size in enumerate(mesh.shape):
        start = sum(map(mul, coordinate, strides)) - coordinate[dim] * strides[dim]
        yield [mesh.ranks[start + at * strides[dim]] for at in range(size)]


def _record_layout(mesh: Mesh, how: MeshRecord) -> Call:
    """Return a ``_MeshLayout``: size and stride of each mesh dim, in ``axes`` none for a size 1."""
    cls, strides = Global(_LAYOUT, "_MeshLayout"), row_major_strides(mesh.shape, 1)
    if how is MeshRecord.LAYOUT:
        return new_object(cls, shape=mesh.shape, stride=strides)
    pairs = zip(mesh.shape, strides, strict=True)
    axes = [((size,), (step,)) if size > 1 else ((), ()) for size, step in pairs]
    axis = Global(_LAYOUT, "_FlatLayout")
    records = [new_object(axis, shape=shape, stride=stride) for shape, stride in axes]
    return new_object(cls, axes=tuple(records))
