"""Merge and cut the local tensors of tensor-parallel ranks, each stored whole in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, Place, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh, Replicate, Shard
from ckptool.core.sharding.tensor_parallel import RankShard, TpRule, fit_ranks, merge_shards
from ckptool.core.views import shift_place
from ckptool.errors import Damaged


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One rank's shard of a tensor, which is stored as a plain tensor."""

    dtype: DType
    shape: tuple[int, ...]
    at: Place


LocalTensors = Mapping[int, LocalTensor]
"""The local tensors of one name by rank."""


def merge_ranks(
    name: str, path: Path, parts: LocalTensors, rule: TpRule, *, world: int
) -> TensorEntry:
    """Return the tensor that the local ones of all ranks make by a rule.

    Raises Damaged where a rank has none, or they differ in more than the size along the rule's dim;
    Raises Undetermined where they are not what the rule says.
    """
    missing = sorted(set(range(world)) - set(parts))
    if missing:
        message = f"{name}: rank {missing[0]} has none, rank {min(parts)} has one"
        raise Damaged(message, "rank-missing", tensor=name)
    ordered = [parts[rank] for rank in range(world)]
    first, dim = ordered[0], rule.dim
    for rank, part in enumerate(ordered):
        if part.dtype != first.dtype or _without(part.shape, dim) != _without(first.shape, dim):
            message = f"{name}: rank 0 holds {first.dtype} {list(first.shape)},"
            message += f" rank {rank} {part.dtype} {list(part.shape)}"
            message += "" if dim is None else f"; sharded along dim {dim}, only that may differ"
            raise Damaged(message, "ranks-disagree", tensor=name)
    shards = [
        RankShard(part.dtype, part.shape, [Chunk(Box.whole(part.shape), part.at, rank)])
        for rank, part in enumerate(ordered)
    ]
    entry = merge_shards(name, path, shards, fit_ranks([part.shape for part in ordered], rule))
    placement = Replicate() if dim is None else Shard(dim)
    known = (placement,) if len(rule.blocks) == 1 else None
    return replace(entry, placements=known, mesh=tp_mesh(world))


def keep_whole(name: str, owned: tuple[int, LocalTensor]) -> TensorEntry:
    """Return a tensor that one rank holds whole, from that rank and its local tensor."""
    rank, part = owned
    chunk = Chunk(Box.whole(part.shape), part.at, rank)
    return TensorEntry(name, (name,), part.dtype, part.shape, (chunk,))


def rows_of(name: str, part: LocalTensor, start: int, stop: int) -> LocalTensor:
    """Return some rows of a local tensor; Damaged where it has none such."""
    if not part.shape or not 0 <= start <= stop <= part.shape[0]:
        raise Damaged(f"{name}: {list(part.shape)} has no rows {start} to {stop}")
    box = Box.along(0, start, (stop - start, *part.shape[1:]))
    return LocalTensor(part.dtype, box.shape, shift_place(part.at, box.lo))


def halves(name: str, parts: LocalTensors, which: int) -> LocalTensors:
    """Return the first or the second half of the rows of each local tensor."""
    odd = [part.shape for part in parts.values() if not part.shape or part.shape[0] % 2]
    if odd:
        raise Damaged(f"{name}: {list(odd[0])} does not have two equal halves")
    sizes = {rank: part.shape[0] // 2 for rank, part in parts.items()}
    return {
        rank: rows_of(name, part, which * sizes[rank], (which + 1) * sizes[rank])
        for rank, part in parts.items()
    }


def tp_mesh(world: int) -> Mesh:
    """Return the mesh of ``world`` tensor-parallel ranks."""
    return Mesh.of((world,), ("tp",))


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    if dim is not None and dim >= len(shape):
        return shape
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]
