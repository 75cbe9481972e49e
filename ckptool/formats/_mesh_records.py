"""Device meshes as torch pickles them within DTensors.

A tensor of ranks (torch 2.1 to 2.9), or a layout and a rank map (2.10 to 2.13).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

from ckptool.core.catalog import Extent
from ckptool.core.mesh import Mesh
from ckptool.errors import Damaged
from ckptool.formats._pickle import Call
from ckptool.formats._storage import natural, place_of, plain_tensor, shown, sizes
from ckptool.formats._torch_file import TorchFile
from ckptool.formats.base import Source

_MOST_RANKS = 1 << 18


def mesh_of(record: Any, file: TorchFile, source: Source) -> tuple[Mesh, int | None]:
    """The mesh, and the rank that pickled it where the record says so."""
    fields = call_fields(record, "DeviceMesh")
    if record not in file.meshes:
        file.meshes[record] = read_mesh(fields, file, source)
    return file.meshes[record]


def read_mesh(fields: dict[str, Any], file: TorchFile, source: Source) -> tuple[Mesh, int | None]:
    """The mesh of a record with these attributes, and the rank that pickled it."""
    names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
    names = tuple(map(as_text, names)) if names else None
    coordinate = fields.get("_coordinate_on_dim")
    at = sizes(coordinate) if isinstance(coordinate, tuple | list) else None
    if "mesh" not in fields:
        return _mesh_of_layout(fields, names, at, file, source)
    shape, ranks = _ints(fields.get("mesh"), file, source)
    mesh = Mesh(shape, names, tuple(ranks))
    return mesh, next((rank for rank in ranks if mesh.coordinate(rank) == at), None)


def _mesh_of_layout(
    fields: dict[str, Any],
    names: tuple[str, ...] | None,
    at: tuple[int, ...] | None,
    file: TorchFile,
    source: Source,
) -> tuple[Mesh, int | None]:
    """A mesh by layout and rank map, as torch 2.10 to 2.13 records it."""
    flat = fields.get("_flatten_rank_map")
    ranks = (
        flat_ints(flat) if flat is not None else tuple(_ints(fields["_rank_map"], file, source)[1])
    )
    axes = _axes(fields["_layout"], len(ranks))
    shape = tuple(len(axis) for axis in axes)
    offsets = [sum(steps) for steps in itertools.product(*axes)]
    rank = fields.get("_rank")
    base = 0
    if len(offsets) < len(ranks):
        if not isinstance(rank, int) or at is None or len(at) != len(axes) or rank not in ranks:
            raise Damaged(f"{file.what}: a sub-mesh that does not say which rank pickled it")
        base = ranks.index(rank) - sum(axis[i] for axis, i in zip(axes, at, strict=True))
    if base < 0 or base + max(offsets) >= len(ranks):
        raise Damaged(f"{file.what}: a mesh layout that leaves its {len(ranks)} ranks")
    members = tuple(int(ranks[base + offset]) for offset in offsets)
    return Mesh(shape, names, members), rank if isinstance(rank, int) else None


def _axes(layout: Any, ranks: int) -> list[list[int]]:
    """For each mesh dim, the offset into the map of ``ranks`` ranks of each step along it."""
    fields = call_fields(layout, "_MeshLayout")
    if "axes" in fields:
        flat = [call_fields(axis, "_FlatLayout") for axis in fields["axes"]]
        pairs = [(axis["shape"], axis["stride"]) for axis in flat]
    else:
        shape, stride = fields["shape"], fields["stride"]
        pairs = (
            [(shape, stride)] if isinstance(shape, int) else list(zip(shape, stride, strict=True))
        )
    flat_pairs = [(flat_ints(shape), flat_ints(stride)) for shape, stride in pairs]
    if math.prod(math.prod(shape) for shape, _ in flat_pairs) > ranks:
        raise Damaged(f"a mesh layout of more than its {ranks:,} ranks")
    return [_axis_offsets(shape, stride) for shape, stride in flat_pairs]


def flat_ints(value: Any) -> tuple[int, ...]:
    """The ints of a nested tuple, in order."""
    found: list[int] = []
    stack = [value]
    left = _MOST_RANKS
    while stack:
        item = stack.pop()
        left -= 1
        if isinstance(item, tuple | list):
            left -= len(item)
            stack += reversed(item)
        else:
            found.append(natural(item))
        if left < 0:
            raise Damaged(f"a mesh of more than {_MOST_RANKS:,} ranks")
    return tuple(found)


def _axis_offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    steps = [[i * s for i in range(n)] for n, s in zip(shape, stride, strict=True)]
    return [sum(step) for step in itertools.product(*steps)]


def _ints(value: Any, file: TorchFile, source: Source) -> tuple[tuple[int, ...], list[int]]:
    """Shape and values, row-major, of the small integer tensor an older mesh is recorded as."""
    tensor = plain_tensor(value)
    if tensor is None or tensor.dtype.kind != "int" or len(tensor.shape) > 8:
        raise Damaged(f"{file.what}: a device mesh without its ranks")
    place = place_of(tensor, file)
    if not isinstance(place, Extent) or math.prod(tensor.shape) > _MOST_RANKS:
        raise Damaged(f"{file.what}: a device mesh of {list(tensor.shape)} in {place.file}")
    itemsize = tensor.dtype.itemsize
    data = source.read(place.file, place.offset, tensor.storage.nbytes - tensor.offset * itemsize)
    starts = [
        sum(i * stride for i, stride in zip(index, place.strides, strict=True))
        for index in itertools.product(*map(range, tensor.shape))
    ]
    order: Literal["little", "big"] = "big" if "byteswap" in place.ops else "little"
    return tensor.shape, [
        int.from_bytes(data[start : start + itemsize], order, signed=True) for start in starts
    ]


def as_text(value: Any) -> str:
    """A name of a pickle; Damaged where it is something else."""
    if not isinstance(value, str):
        raise Damaged(f"{shown(value)} where a name is expected")
    return value


def call_fields(value: Any, expected: str) -> dict[str, Any]:
    """The attributes of a record; Damaged where it is none."""
    if not isinstance(value, Call):
        raise Damaged(f"{type(value).__name__} where a {expected} record is expected")
    return value.fields
