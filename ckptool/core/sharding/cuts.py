"""How mesh dims cut a tensor dim: in which order, and which runs of indices each coordinate holds.

Split factors encode the order: a mesh dim is strided by the product of the sizes of the later mesh
dims that cut before it (torch 2.13, ``DTensorSpec._maybe_convert_StridedShard_to_shard_order``;
FSDP2 writes the same).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec import Struct

from ckptool.core.box import PlacedRun
from ckptool.core.mesh import Partial, Placement, Placements, Replicate, Shard, StridedShard
from ckptool.errors import Damaged, Unsupported

Runs = tuple[tuple[int, int], ...]
"""(start, length) of consecutive indices; the local indices are their concatenation."""


class Cut(Struct, frozen=True):
    """One mesh dim cutting a tensor dim: each of ``factor`` chunks is cut in ``size``."""

    mesh_dim: int
    size: int
    factor: int


Cuts = tuple[Cut, ...]


def chunk_bounds(length: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the half-open row ranges when plain shards of ``sizes`` cut ``length`` rows in turn.

    Row-major over the chunk numbers, in the order of the cuts. An empty chunk is
    ``(length, length)``, where torch puts it.
    """
    bounds = [(0, length)]
    for size in sizes:
        bounds = [chunk for low, high in bounds for chunk in _chunk_ranges(low, high, size)]
    return tuple((low, high) if low < high else (length, length) for low, high in bounds)


def _chunk_ranges(low: int, high: int, count: int) -> list[tuple[int, int]]:
    step = -(-(high - low) // count)
    return [(min(low + step * i, high), min(low + step * (i + 1), high)) for i in range(count)]


@lru_cache(maxsize=128)
def runs_table(length: int, cuts: Cuts) -> tuple[Runs, ...]:
    """Return the index runs for each combination of chunk numbers, row-major in order of cuts."""
    table: list[Runs] = [whole(length)]
    for step in cuts:
        table = [part for runs in table for part in _split(runs, step)]
    return tuple(table)


def whole(length: int) -> Runs:
    """Return all indices of a dim of ``length``."""
    return ((0, length),) if length else ()


def table_index(cuts: Cuts, at: tuple[int, ...]) -> int:
    """Return the place in :func:`runs_table` of what mesh coordinate ``at`` holds."""
    index = 0
    for step in cuts:
        index = index * step.size + at[step.mesh_dim]
    return index


def _split(runs: Runs, step: Cut) -> Iterator[Runs]:
    """Yield the runs of each of the ``step.size`` chunks."""
    total = total_length(runs)
    groups = _chunks(total, min(step.factor, total))
    parts = list(_take(runs, (n for group in groups for n in _chunks(group, step.size))))
    for index in range(step.size):
        yield _join(itertools.chain.from_iterable(parts[index :: step.size]))


def _chunks(length: int, count: int) -> list[int]:
    """Return the lengths of ``torch.chunk``, padded with zeros up to ``count``."""
    size = -(-length // count) if count else 0
    return [min(size, max(0, length - size * index)) for index in range(count)]


def _take(runs: Runs, lengths: Iterable[int]) -> Iterator[Runs]:
    """Yield consecutive parts of the index sequence, of the given lengths."""
    pending = list(reversed(runs))
    for length in lengths:
        part = []
        while length:
            start, size = pending.pop()
            step = min(size, length)
            part.append((start, step))
            if step < size:
                pending.append((start + step, size - step))
            length -= step
        yield tuple(part)


def _join(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the runs with adjacent ones merged."""
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def total_length(runs: Runs) -> int:
    """Count the indices of runs."""
    return sum(length for _, length in runs)


def place_runs(runs: Runs) -> list[PlacedRun]:
    """Return each run with where it begins in the local tensor."""
    placed, local = [], 0
    for start, length in runs:
        placed.append((start, local, length))
        local += length
    return placed


Order = tuple[int, ...]
"""The mesh dims that cut a tensor dim, in the order they cut; () where it is whole."""


def cuts_by_dim(
    rank: int, sizes: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[Cuts, ...]:
    """Return for each of ``rank`` tensor dims the mesh dims that cut it, from left to right."""
    if len(placements) != len(sizes):
        raise Damaged(f"{len(placements)} placements on a mesh of {len(sizes)} dims")
    by_dim: list[list[Cut]] = [[] for _ in range(rank)]
    for mesh_dim, (size, placement) in enumerate(zip(sizes, placements, strict=True)):
        if isinstance(placement, Partial):
            raise Unsupported(
                f"{placement} on mesh dim {mesh_dim}: each rank holds an addend, not the values"
            )
        if not isinstance(placement, Replicate):
            dim = _tensor_dim(placement, rank)
            by_dim[dim].append(Cut(mesh_dim, size, _factor(placement)))
    return tuple(map(tuple, by_dim))


def _tensor_dim(placement: Shard | StridedShard, rank: int) -> int:
    """Return the dim a placement cuts, negative ones counted from the end."""
    if not -rank <= placement.dim < rank:
        raise Damaged(f"{placement} of a tensor with {rank} dims")
    return placement.dim % rank


def _factor(placement: Shard | StridedShard) -> int:
    if isinstance(placement, Shard):
        return 1
    if placement.split_factor < 1:
        raise Damaged(f"{placement} has a split factor below 1")
    return placement.split_factor


def encoded_order(cuts: Cuts) -> Cuts | None:
    """Return the plain cuts in the order that the split factors encode; None if they do not."""
    if all(cut.factor == 1 for cut in cuts):
        return cuts
    order: list[Cut] = []
    for cut in reversed(cuts):
        products = list(itertools.accumulate((c.size for c in order), operator.mul, initial=1))
        if cut.factor not in products:
            return None
        order.insert(products.index(cut.factor), Cut(cut.mesh_dim, cut.size, 1))
    return tuple(order)


def after_the_later(cuts: Cuts) -> Cuts:
    """Return the plain cuts in FSDP2's order: a strided mesh dim cuts after all later ones."""
    order: list[Cut] = []
    for cut in reversed(cuts):
        plain = Cut(cut.mesh_dim, cut.size, 1)
        order = [*order, plain] if cut.factor > 1 else [plain, *order]
    return tuple(order)


def placements_of(orders: Sequence[Sequence[int]], shape: Sequence[int]) -> Placements:
    """Return the placements on a mesh of ``shape`` that encode the order of each tensor dim."""
    placements: list[Placement] = [Replicate()] * len(shape)
    for dim, order in enumerate(orders):
        for index, mesh_dim in enumerate(order):
            factor = math.prod(shape[other] for other in order[:index] if other > mesh_dim)
            placements[mesh_dim] = StridedShard(dim, factor) if factor > 1 else Shard(dim)
    return tuple(placements)
