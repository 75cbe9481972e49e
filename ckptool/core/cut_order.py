"""In which order the mesh dims cut a tensor dim, and how split factors encode it.

A mesh dim is strided by the product of the sizes of the later mesh dims that cut before it (torch
2.13, ``DTensorSpec._maybe_convert_StridedShard_to_shard_order``; FSDP2 writes the same).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from ckptool.core.mesh import Partial, Placement, Placements, Replicate, Shard, StridedShard
from ckptool.core.runs import Cut, Cuts
from ckptool.errors import CannotDo, Damaged

Order = tuple[int, ...]
"""The mesh dims that cut a tensor dim, in the order they cut; () where it is whole."""


def cuts_by_dim(
    rank: int, sizes: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[Cuts, ...]:
    """For each of ``rank`` tensor dims the mesh dims that cut it, from left to right."""
    if len(placements) != len(sizes):
        raise Damaged(f"{len(placements)} placements on a mesh of {len(sizes)} dims")
    by_dim: list[list[Cut]] = [[] for _ in range(rank)]
    for mesh_dim, (size, placement) in enumerate(zip(sizes, placements, strict=True)):
        if isinstance(placement, Partial):
            raise CannotDo(
                f"{placement} on mesh dim {mesh_dim}: each rank holds an addend, not the values"
            )
        if not isinstance(placement, Replicate):
            dim = _tensor_dim(placement, rank)
            by_dim[dim].append(Cut(mesh_dim, size, _factor(placement)))
    return tuple(map(tuple, by_dim))


def _tensor_dim(placement: Shard | StridedShard, rank: int) -> int:
    """The dim a placement cuts, negative ones counted from the end."""
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
    """The plain cuts in the order that the split factors encode, or None where they encode none."""
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
    """The plain cuts in FSDP2's order: a mesh dim that is strided cuts after all later ones."""
    order: list[Cut] = []
    for cut in reversed(cuts):
        plain = Cut(cut.mesh_dim, cut.size, 1)
        order = [*order, plain] if cut.factor > 1 else [plain, *order]
    return tuple(order)


def placements_of(orders: Sequence[Sequence[int]], shape: Sequence[int]) -> Placements:
    """Placements on a mesh of ``shape`` that encode the order of each tensor dim."""
    placements: list[Placement] = [Replicate()] * len(shape)
    for dim, order in enumerate(orders):
        for index, mesh_dim in enumerate(order):
            factor = math.prod(shape[other] for other in order[:index] if other > mesh_dim)
            placements[mesh_dim] = StridedShard(dim, factor) if factor > 1 else Shard(dim)
    return tuple(placements)
