"""What of a live torch tensor this rank holds: all of a plain one, else its own boxes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptool.core.box import Box, overlapping_pair
from ckptool.core.mesh import Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import SHARD_ATTRIBUTES, Piece, declared_pieces, shard_at

if TYPE_CHECKING:
    import torch


def why_not_held(tensor: torch.Tensor) -> str | None:
    """Return why it is unknown which values this rank holds; None where it is known."""
    if _is_dtensor(tensor):
        partial = None in _placements(tensor)
        return "a partial placement: each rank holds an addend, not values" if partial else None
    return _why_not_declared(tensor) if _declares_shards(tensor) else None


def _why_not_declared(tensor: torch.Tensor) -> str | None:
    """Return why its attributes do not say which values it holds; None where they do."""
    try:
        pieces = local_pieces(tensor)
    except (TypeError, ValueError) as error:
        return f"its attributes {', '.join(SHARD_ATTRIBUTES)} contradict one another: {error}"
    pair = overlapping_pair([piece.local for piece in pieces])
    return f"two of its shards share elements: {pair[0]} and {pair[1]}" if pair else None


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the global tensor of which this rank may hold a part."""
    return tuple(tensor.global_shape if _declares_shards(tensor) else tensor.shape)  # type: ignore[attr-defined]


def declared_boxes(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """Return the boxes of the global tensor that its own attributes name; None without these."""
    if not _declares_shards(tensor):
        return None
    return tuple(piece.box for piece in local_pieces(tensor))


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the memory of this rank: one tensor, or those of a ShardedTensor's own shards."""
    if _is_sharded(tensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()]  # type: ignore[attr-defined]
    local: torch.Tensor = tensor._local_tensor if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return [local.detach()]


def local_parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of the global tensor that this rank holds, each with its memory."""
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
    """Return which boxes of the global tensor lie where in this rank's memory.

    None where the rank is not on the mesh. Strided shards are read as FSDP2 cuts them, where this
    rank's local shape fits that. Raises ValueError where its attributes declare shards that do not
    fit, Damaged where the local shape fits no reading.
    """
    if _declares_shards(tensor):
        whole_shape, above, inside, lengths = (getattr(tensor, n) for n in SHARD_ATTRIBUTES)
        return declared_pieces(whole_shape, above, inside, lengths, tuple(tensor.shape))
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
        [placement for placement in _placements(tensor) if placement is not None],
        local_shape=tuple(local_tensors(tensor)[0].shape),
        shard_order=[(cut.tensor_dim, tuple(cut.mesh_dims)) for cut in order] if order else None,
    ).pieces


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether it is one of ``torch.distributed._shard``, as in FSDP1's state dicts."""
    return hasattr(tensor, "local_shards")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def _declares_shards(tensor: torch.Tensor) -> bool:
    """Return whether it is a CheckpointableTensor of torch 2.15, which names its boxes."""
    if _is_dtensor(tensor) or _is_sharded(tensor):
        return False
    return all(hasattr(tensor, name) for name in SHARD_ATTRIBUTES)


def _placements(tensor: Any) -> list[Placement | None]:
    """Return the placements as ckptool's own; None for one that is partial."""
    return [_placement(placement) for placement in tensor.placements]


def _placement(theirs: Any) -> Placement | None:
    if theirs.is_replicate():
        return Replicate()
    if theirs.is_partial():
        return None
    factor = getattr(theirs, "split_factor", None)
    return Shard(theirs.dim) if factor is None else StridedShard(theirs.dim, factor)
