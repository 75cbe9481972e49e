"""Put the local tensors of tensor-parallel ranks together, where a rule says how they were cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, Place, TensorEntry, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh, Replicate, Shard
from ckptool.errors import Damaged, Problem


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's part of a tensor, a plain tensor by itself."""

    dtype: DType
    shape: tuple[int, ...]
    at: Place


Locals = Mapping[int, Local]
"""The local tensors of one name by rank."""


def joined(
    name: str, path: Path, parts: Locals, dim: int | None, *, world: int, holders: int = 1
) -> TensorEntry:
    """The tensor whose ranks hold consecutive parts along ``dim``, or copies where it is None.

    Each part is held by ``holders`` consecutive ranks. Raises Damaged where a rank has none, or
    the parts do not fit together.
    """
    missing = sorted(set(range(world)) - set(parts))
    if missing:
        message = f"{name}: rank {missing[0]} has none, rank {min(parts)} has one"
        raise Damaged(Problem(message, "rank-missing", tensor=name))
    ordered = [parts[rank] for rank in range(world)]
    first = ordered[0]
    for rank, part in enumerate(ordered):
        if part.dtype != first.dtype or _without(part.shape, dim) != _without(first.shape, dim):
            message = f"{name}: rank 0 holds {first.dtype} {list(first.shape)},"
            message += f" rank {rank} {part.dtype} {list(part.shape)}"
            message += "" if dim is None else f"; cut along dim {dim}, only that may differ"
            raise Damaged(Problem(message, "ranks-disagree", tensor=name))
    chunks, shape = _laid(ordered, dim, holders)
    placement = Replicate() if dim is None else Shard(dim)
    mesh = tp_mesh(world)
    return TensorEntry(name, path, first.dtype, shape, merge_copies(chunks), (placement,), mesh)


def tp_mesh(world: int) -> Mesh:
    """The mesh of ``world`` tensor-parallel ranks."""
    return Mesh.of((world,), ("tp",))


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    if dim is not None and dim >= len(shape):
        return shape
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


def _laid(
    ordered: list[Local], dim: int | None, holders: int
) -> tuple[list[Chunk], tuple[int, ...]]:
    """The parts as chunks, side by side along ``dim``, and the shape of the whole."""
    shape = ordered[0].shape
    if dim is None:
        box = Box.whole(shape)
        return [Chunk(box, part.at, rank) for rank, part in enumerate(ordered)], shape
    if dim >= len(shape):
        raise Damaged(f"a tensor of {len(shape)} dims cannot be cut along dim {dim}")
    chunks, position = [], 0
    for rank, part in enumerate(ordered):
        offset = tuple(position if at == dim else 0 for at in range(len(shape)))
        chunks.append(Chunk(Box.at(offset, part.shape), part.at, rank))
        position += part.shape[dim] if (rank + 1) % holders == 0 else 0
    return chunks, (*shape[:dim], position, *shape[dim + 1 :])
