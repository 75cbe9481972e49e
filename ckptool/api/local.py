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
    """Why it cannot be told which values this rank holds; None where it can."""
    if _is_dtensor(tensor):
        partial = [one for one in _placements(tensor) if one is None]
        return "a partial placement: each rank holds an addend, not values" if partial else None
    return _why_not_declared(tensor) if _declares_shards(tensor) else None


def _why_not_declared(tensor: torch.Tensor) -> str | None:
    """Why its attributes do not say which values it holds; None where they do."""
    try:
        pieces = local_pieces(tensor)
    except (TypeError, ValueError) as error:
        return f"its attributes {', '.join(SHARD_ATTRIBUTES)} contradict one another: {error}"
    pair = overlapping_pair([piece.local for piece in pieces])
    return f"two of its shards share elements: {pair[0]} and {pair[1]}" if pair else None


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor of which this rank may hold a part."""
    return tuple(tensor.global_shape if _declares_shards(tensor) else tensor.shape)  # type: ignore[attr-defined]


def declared_boxes(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """The boxes of the whole tensor that its own attributes name; None where it has none such."""
    if not _declares_shards(tensor):
        return None
    return tuple(piece.box for piece in local_pieces(tensor))


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

    None where the rank is not on the mesh. ValueError where its attributes declare shards that do
    not fit. Strided shards are read as FSDP2 cuts them, where this
    rank's local shape fits that. Damaged where it fits no reading.
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
        [one for one in _placements(tensor) if one is not None],
        local_shape=tuple(local_tensors(tensor)[0].shape),
        shard_order=[(one.tensor_dim, tuple(one.mesh_dims)) for one in order] if order else None,
    ).pieces


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is one of ``torch.distributed._shard``, as FSDP1's state dicts have them."""
    return hasattr(tensor, "local_shards")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def _declares_shards(tensor: torch.Tensor) -> bool:
    """Whether it is a CheckpointableTensor of torch 2.15: a plain one that says what it is."""
    if _is_dtensor(tensor) or _is_sharded(tensor):
        return False
    return all(hasattr(tensor, name) for name in SHARD_ATTRIBUTES)


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
