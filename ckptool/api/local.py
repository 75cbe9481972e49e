"""What of a live torch tensor this rank holds: all of a plain one, else its own boxes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptool.core.box import Box
from ckptool.core.mesh import Placement, Replicate, Shard, StridedShard
from ckptool.core.shards import Piece, shard_at

if TYPE_CHECKING:
    import torch


def why_not_held(tensor: torch.Tensor) -> str | None:
    """Why it cannot be told which values this rank holds; None where it can."""
    if _is_dtensor(tensor):
        partial = [one for one in _placements(tensor) if one is None]
        return "a partial placement: each rank holds an addend, not values" if partial else None
    return None


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory of this rank: one tensor, or those of a ShardedTensor's own shards."""
    if _is_sharded(tensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()]  # type: ignore[attr-defined]
    found: torch.Tensor = tensor._local_tensor if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return [found.detach()]


def local_parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Which boxes of the global tensor this rank holds, each with its memory. See local_pieces."""
    if _is_sharded(tensor):
        for shard in tensor.local_shards():  # type: ignore[attr-defined]
            place = shard.metadata
            yield Box.at(place.shard_offsets, place.shard_sizes), shard.tensor.detach()
        return
    (local,) = local_tensors(tensor)
    for piece in local_pieces(tensor):
        inside = tuple(map(slice, piece.local.lo, piece.local.hi))
        yield piece.box, local[inside] if inside else local


def local_pieces(tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Which boxes of the global tensor lie where in this rank's memory.

    None where the rank is not on the mesh. Strided shards are read as FSDP2 cuts them, where this
    rank's local shape fits that. Damaged where it fits no reading.
    """
    if not _is_dtensor(tensor):
        whole = Box.whole(tuple(tensor.shape))
        return (Piece(whole, whole),)
    mesh, spec = tensor.device_mesh, tensor._spec  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    position = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        position = position * size + at
    order = getattr(spec, "shard_order", None)
    return shard_at(
        position,
        tuple(tensor.shape),
        tuple(mesh.shape),
        [one for one in _placements(tensor) if one is not None],
        local_shape=tuple(local_tensors(tensor)[0].shape),
        shard_order=[(one.tensor_dim, tuple(one.mesh_dims)) for one in order] if order else None,
    ).pieces


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is one of ``torch.distributed._shard``, as FSDP1's state dicts have them."""
    return hasattr(tensor, "local_shards")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def _placements(tensor: Any) -> list[Placement | None]:
    """The placements as ckptool's own; None for one that is partial."""
    return [_placement(one) for one in tensor.placements]


def _placement(theirs: Any) -> Placement | None:
    if theirs.is_replicate():
        return Replicate()
    if theirs.is_partial():
        return None
    factor = getattr(theirs, "split_factor", None)
    return Shard(theirs.dim) if factor is None else StridedShard(theirs.dim, factor)
