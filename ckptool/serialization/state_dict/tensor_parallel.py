"""Put the local tensors of tensor-parallel ranks together, where a rule says how they were cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, Place, TensorEntry, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh, Replicate, Shard
from ckptool.core.views import shifted
from ckptool.errors import CannotDo, Damaged, Problem


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's part of a tensor, a plain tensor by itself."""

    dtype: DType
    shape: tuple[int, ...]
    at: Place


Locals = Mapping[int, Local]
"""The local tensors of one name by rank."""


def joined(
    name: str,
    path: Path,
    parts: Locals,
    dim: int | None,
    *,
    world: int,
    holders: int = 1,
    blocks: tuple[int, ...] = (1,),
) -> TensorEntry:
    """The tensor whose ranks hold consecutive parts along ``dim``, or copies where it is None.

    Each part is held by ``holders`` consecutive ranks. Where there are several ``blocks``, a rank
    holds a part of each, of which these numbers are the shares. Raises Damaged where a rank has
    none, or the parts do not fit together; CannotDo where a part is no such blocks.
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
    if dim is None:
        shape = first.shape
        chunks = [Chunk(Box.whole(shape), part.at, rank) for rank, part in enumerate(ordered)]
    else:
        chunks, shape = _laid(name, ordered, dim, holders, blocks)
    placement = Replicate() if dim is None else Shard(dim)
    known = (placement,) if len(blocks) == 1 else None
    mesh = tp_mesh(world)
    return TensorEntry(name, path, first.dtype, shape, merge_copies(chunks), known, mesh)


def single(name: str, held: tuple[int, Local]) -> TensorEntry:
    """A tensor that one rank holds whole."""
    rank, part = held
    chunk = Chunk(Box.whole(part.shape), part.at, rank)
    return TensorEntry(name, (name,), part.dtype, part.shape, (chunk,))


def rows_of(name: str, part: Local, start: int, stop: int) -> Local:
    """Some rows of a local tensor; Damaged where it has none such."""
    if not part.shape or not 0 <= start <= stop <= part.shape[0]:
        raise Damaged(f"{name}: {list(part.shape)} has no rows {start} to {stop}")
    box = Box.along(0, start, (stop - start, *part.shape[1:]))
    return Local(part.dtype, box.shape, shifted(part.at, box.lo))


def halves(name: str, parts: Locals, which: int) -> Locals:
    """The first or the second half of the rows of each local tensor."""
    odd = [part.shape for part in parts.values() if not part.shape or part.shape[0] % 2]
    if odd:
        raise Damaged(f"{name}: {list(odd[0])} has no two halves")
    sizes = {rank: part.shape[0] // 2 for rank, part in parts.items()}
    return {
        rank: rows_of(name, part, which * sizes[rank], (which + 1) * sizes[rank])
        for rank, part in parts.items()
    }


def tp_mesh(world: int) -> Mesh:
    """The mesh of ``world`` tensor-parallel ranks."""
    return Mesh.of((world,), ("tp",))


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    if dim is not None and dim >= len(shape):
        return shape
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


def _laid(
    name: str, ordered: list[Local], dim: int, holders: int, blocks: tuple[int, ...]
) -> tuple[list[Chunk], tuple[int, ...]]:
    """The parts as chunks, block by block and side by side along ``dim``, and the whole's shape."""
    shape = ordered[0].shape
    if dim >= len(shape) or any(part.shape[dim] % sum(blocks) for part in ordered):
        cut = f"dim {dim}" if len(blocks) == 1 else f"dim {dim} in {len(blocks)} blocks"
        raise CannotDo(f"{name}: a part of {list(shape)} cannot be cut along {cut}")
    chunks, position, before = [], 0, 0
    for block in blocks:
        for rank, part in enumerate(ordered):
            share = part.shape[dim] // sum(blocks)
            size = (*part.shape[:dim], block * share, *part.shape[dim + 1 :])
            at = shifted(part.at, Box.along(dim, before * share, size).lo)
            chunks.append(Chunk(Box.along(dim, position, size), at, rank))
            position += block * share if (rank + 1) % holders == 0 else 0
        before += block
    return chunks, (*shape[:dim], position, *shape[dim + 1 :])
