"""The records torch 2.13 pickles a DTensor as, for one rank of a mesh that need not exist.

Each is what ``torch.save`` writes in a job whose first groups are those of its one mesh. Hashes
are left to be computed anew, as torch does where it finds None: a recorded one would be wrong in
another process.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ckptool.core.box import row_major_strides
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import LocalShard
from ckptool.errors import Unsupported
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.pickle.write import (
    KnownTensor,
    ShardRef,
    contiguous_strides,
    dtype_global,
)

_SPEC, _LAYOUT = "torch.distributed.tensor._dtensor_spec", "torch.distributed._mesh_layout"
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_PLACEMENTS = "torch.distributed.tensor.placement_types"

_Likeness = tuple[DType, tuple[int, ...], tuple[Placement, ...]]


class RankRecords:
    """Makes the DTensors of one rank's file.

    All share one record of the mesh, and those that are alike but for their values (a layer's and
    the next one's, a weight's and its moments') one of everything else, as torch's operators do.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh = _device_mesh(mesh, rank)
        self._layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        self._device = Call(Global("torch", "device"), ("cpu",))
        self._alike: dict[_Likeness, tuple[tuple[Any, ...], Call]] = {}

    def dtensor(
        self, entry: TensorEntry, shard: LocalShard, placements: tuple[Placement, ...]
    ) -> Call:
        """The call that rebuilds this rank's share of a tensor."""
        likeness = (entry.dtype, entry.shape, placements)
        if likeness not in self._alike:
            self._alike[likeness] = self._wrapper(*likeness[:2]), self._spec(*likeness)
        wrapper, spec = self._alike[likeness]
        state = {"_local_tensor": ShardRef(entry, shard), "_spec": spec}
        return Call(_REBUILD, (_REBUILD_WRAPPER, _DTENSOR, wrapper, (None, state)))

    def _wrapper(self, dtype: DType, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments that make the DTensor itself, which has no values."""
        stride = contiguous_strides(shape)
        named = dtype_global(dtype)
        return (_DTENSOR, named, shape, stride, 0, self._layout, self._device, False)

    def _spec(
        self, dtype: DType, shape: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> Call:
        """A ``DTensorSpec``, as its ``__post_init__`` leaves it."""
        strided = any(isinstance(item, StridedShard) for item in placements)
        size = Call(Global("torch", "Size"), (shape,))
        meta = (size, contiguous_strides(shape), dtype_global(dtype))
        return _made(
            Global(_SPEC, "DTensorSpec"),
            mesh=self._mesh,
            placements=tuple(_placement(item, len(shape)) for item in placements),
            tensor_meta=Call(Global(_SPEC, "TensorMeta"), meta, is_new=True),
            shard_order=None if strided else _default_order(placements, len(shape)),
            use_strided_shard_as_shard_order=strided,
            _hash=None,
        )


def _made(cls: Global, **attributes: Any) -> Call:
    """An object of a class, made without its ``__init__``."""
    call = Call(cls, (), is_new=True)
    call.state = attributes
    return call


def _placement(item: Placement, rank: int) -> Call:
    """A placement; its dim counts from the front, as torch records it."""
    if isinstance(item, Shard):
        return _made(Global(_PLACEMENTS, "Shard"), dim=item.dim % rank)
    if isinstance(item, StridedShard):
        cls = Global(_PLACEMENTS, "_StridedShard")
        return _made(cls, dim=item.dim % rank, split_factor=item.split_factor)
    if isinstance(item, Replicate):
        return _made(Global(_PLACEMENTS, "Replicate"))
    raise Unsupported(f"{item}: values that are partial sums cannot be written")


def _default_order(placements: Sequence[Placement], rank: int) -> tuple[Call, ...]:
    """The cuts of each tensor dim from left to right (``compute_default_shard_order``)."""
    by_dim: dict[int, list[int]] = defaultdict(list)
    for mesh_dim, item in enumerate(placements):
        if isinstance(item, Shard):
            by_dim[item.dim % rank].append(mesh_dim)
    cls = Global(_SPEC, "ShardOrderEntry")
    return tuple(Call(cls, (dim, tuple(by_dim[dim])), is_new=True) for dim in sorted(by_dim))


def _device_mesh(mesh: Mesh, rank: int) -> Call:
    """A root ``DeviceMesh`` on the CPU, as ``rank`` sees it."""
    ranks = struct.pack(f"<{mesh.size}i", *mesh.ranks)
    return _made(
        Global("torch.distributed.device_mesh", "DeviceMesh"),
        _device_type="cpu",
        _layout=_mesh_layout(mesh),
        _rank_map=KnownTensor(BY_NAME["int32"], (mesh.size,), ranks),
        _mesh_dim_names=mesh.names,
        _root_mesh=None,
        _flatten_rank_map=mesh.ranks,
        _thread_id=None,
        _flatten_mapping={},
        _dim_group_names=_group_names(mesh, rank),
        _rank=rank,
        _coordinate_on_dim=mesh.coordinate(rank),
        _hash=None,
    )


def _group_names(mesh: Mesh, rank: int) -> list[str]:
    """The names of a rank's process groups, one a mesh dim, as torch 2.13 numbers them.

    ``init_process_group`` makes group 0; ``init_device_mesh`` takes it for a dim of all ranks, and
    makes for every other dim one group after another, row-major over the other dims.
    """
    coordinate = mesh.coordinate(rank) or ()
    names, made = [], 1
    for dim, size in enumerate(mesh.shape):
        others = [n for at, n in enumerate(mesh.shape) if at != dim]
        index = sum(
            at * step
            for at, step in zip(
                coordinate[:dim] + coordinate[dim + 1 :], row_major_strides(others, 1), strict=True
            )
        )
        names.append("0" if size == mesh.size else str(made + index))
        made += 0 if size == mesh.size else mesh.size // size
    return names


def _mesh_layout(mesh: Mesh) -> Call:
    """A ``_MeshLayout``: size and stride of each mesh dim, none for a dim of size 1."""
    cls = Global(_LAYOUT, "_FlatLayout")
    pairs = zip(mesh.shape, row_major_strides(mesh.shape, 1), strict=True)
    axes = [
        _made(cls, shape=(size,), stride=(step,)) if size > 1 else _made(cls, shape=(), stride=())
        for size, step in pairs
    ]
    return _made(Global(_LAYOUT, "_MeshLayout"), axes=tuple(axes))
