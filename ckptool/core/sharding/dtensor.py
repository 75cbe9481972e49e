"""Which box of a tensor lies where on which rank: the forward rule of torch's DTensor.

Each tensor dim is cut on its own: first into index runs per mesh coordinate, then the runs of all
dims are combined into pieces.

``_StridedShard`` has two readings, and a record does not say which one its writer used. FSDP2 over
tensor parallelism (torch 2.4 to 2.13) writes ``[_StridedShard(0, 2), Shard(0)]`` but cuts the plain
``Shard`` first; ``distribute_tensor`` (torch 2.13) really cuts from left to right. Both give the
same rows when the sizes divide, and differ for example for 9 rows on a 4x2 mesh.

In which order the mesh dims cut a tensor dim, and how split factors encode it.

A mesh dim is strided by the product of the sizes of the later mesh dims that cut before it (torch
2.13, ``DTensorSpec._maybe_convert_StridedShard_to_shard_order``; FSDP2 writes the same).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptool.core.box import Box
from ckptool.core.mesh import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    StridedShard,
    coordinate_of,
)
from ckptool.core.sharding.index_runs import (
    Cut,
    Cuts,
    Runs,
    Span,
    runs_table,
    spans_of,
    table_index,
    total_length,
    whole,
)
from ckptool.errors import Damaged, Unsupported

_MOST_STRIPES = 1 << 16
_MOST_STRIPES_A_POSITION = 8

ShardOrder = Sequence[tuple[int, Sequence[int]]]
"""torch 2.13's ``DTensorSpec.shard_order``: (tensor dim, mesh dims in the order they cut)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``box`` of the global tensor lies at ``local`` of the rank's local tensor (same shapes)."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one mesh position holds: the local tensor's shape and where its parts come from.

    An empty shard has a 0 in ``shape`` and no pieces. There are several pieces where the rows of a
    position are not contiguous in the tensor.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def local_shards(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    local_shapes: Mapping[int, Sequence[int]] | None = None,
    shard_order: ShardOrder | None = None,
) -> tuple[LocalShard, ...]:
    """Return what each row-major mesh position holds of a tensor of global ``shape``.

    ``local_shapes`` are the recorded local shapes by position (some or all). They decide how
    strided shards are read: in the order their split factors encode if all known shapes fit, else
    from left to right. Unknown shapes count as fitting, for FSDP2 is the usual writer. Strided
    shards whose split factors encode no order are read from left to right.

    ``shard_order`` is torch 2.13's; where its mesh dims do not ascend it is followed instead.

    Raises Damaged where the arguments contradict one another (a recorded shape that no reading
    gives, a dim out of range) and Unsupported for a partial placement.
    """
    return _every_shard(_decide(shape, mesh_shape, placements, local_shapes, shard_order))


def shard_at(
    position: int,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    local_shape: Sequence[int],
    shard_order: ShardOrder | None = None,
) -> LocalShard:
    """Return what row-major ``position`` alone holds, as ``local_shards`` tells it of all.

    Of the local shapes only the position's own is known.
    """
    known = {position: local_shape}
    reading = _decide(shape, mesh_shape, placements, known, shard_order)
    return reading.shard(reading.runs_at(position))


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to cut a tensor: for each tensor dim the cuts, in the order they are made."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[Cuts, ...]

    def runs_at(self, position: int) -> tuple[Runs, ...]:
        """Return the index runs of each tensor dim that the mesh position holds."""
        at = coordinate_of(position, self.mesh_shape)
        return tuple(
            runs_table(length, cuts)[table_index(cuts, at)] if cuts else whole(length)
            for length, cuts in zip(self.shape, self.cuts, strict=True)
        )

    def local_shape(self, position: int) -> tuple[int, ...]:
        return tuple(map(total_length, self.runs_at(position)))

    def shard(self, runs: tuple[Runs, ...]) -> LocalShard:
        """Return the shard made of the given index runs."""
        by_dim = [tuple(spans_of(dim_runs)) for dim_runs in runs]
        pieces = tuple(_piece(choice) for choice in itertools.product(*by_dim))
        return LocalShard(tuple(map(total_length, runs)), pieces)

    def first_misfit(self, found: Mapping[int, Sequence[int]]) -> _Misfit | None:
        """The first position whose recorded local shape is not the one this reading gives."""
        for position, shape in sorted(found.items()):
            expected = self.local_shape(position)
            if expected != tuple(shape):
                return _Misfit(position, expected, tuple(shape))
        return None


@dataclass(frozen=True, slots=True, order=True)
class _Misfit:
    position: int
    expected: tuple[int, ...]
    found: tuple[int, ...]


@lru_cache(maxsize=32)
def _every_shard(reading: _Reading) -> tuple[LocalShard, ...]:
    """Return the shards of all positions. Positions that hold the same runs share one object."""
    known: dict[tuple[Runs, ...], LocalShard] = {}
    shards = []
    for position in range(math.prod(reading.mesh_shape)):
        runs = reading.runs_at(position)
        if runs not in known:
            known[runs] = reading.shard(runs)
        shards.append(known[runs])
    return tuple(shards)


def _decide(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    local_shapes: Mapping[int, Sequence[int]] | None,
    shard_order: ShardOrder | None,
) -> _Reading:
    """Return the reading that the recorded local shapes allow, the encoded order first."""
    sizes = tuple(mesh_shape)
    cuts = cuts_by_dim(len(shape), sizes, placements)
    _check_stripes(shape, sizes, cuts)
    found = local_shapes or {}
    _check_positions(found, sizes)
    misfits = []
    for ordered in _orders(cuts, dict(shard_order or ())):
        reading = _Reading(tuple(shape), sizes, ordered)
        misfit = reading.first_misfit(found)
        if misfit is None:
            return reading
        misfits.append(misfit)
    raise _no_reading(max(misfits), shape, sizes, placements)


def _no_reading(
    misfit: _Misfit, shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement]
) -> Damaged:
    names = ", ".join(map(str, placements))
    return Damaged(
        f"mesh position {misfit.position} of {'x'.join(map(str, sizes))} holds a local tensor of "
        f"shape {misfit.found}, but [{names}] of a {tuple(shape)} tensor gives {misfit.expected}"
    )


def _check_stripes(shape: Sequence[int], sizes: Sequence[int], cuts: tuple[Cuts, ...]) -> None:
    """Refuse split factors that would cut a tensor into more stripes than any real mesh does."""
    most = max(_MOST_STRIPES, _MOST_STRIPES_A_POSITION * math.prod(sizes))
    stripes = 1
    for length, dim_cuts in zip(shape, cuts, strict=True):
        factor = min(length, math.prod(cut.factor for cut in dim_cuts))
        if factor > 1:
            stripes *= factor * math.prod(cut.size for cut in dim_cuts)
        if stripes > most:
            raise Damaged(f"strided shards cut a tensor into more than {most:,} stripes")


def _check_positions(positions: Iterable[int], sizes: Sequence[int]) -> None:
    count = math.prod(sizes)
    outside = [position for position in positions if not 0 <= position < count]
    if outside:
        raise Damaged(f"mesh position {outside[0]} is outside a mesh of {count} positions")


def _orders(
    cuts: tuple[Cuts, ...], recorded: dict[int, Sequence[int]]
) -> Iterator[tuple[Cuts, ...]]:
    """Yield the orders to try, best first.

    A recorded order that does not ascend leaves no choice.
    """
    fixed = tuple(
        _in_recorded_order(dim_cuts, recorded.get(dim)) for dim, dim_cuts in enumerate(cuts)
    )
    encoded = [encoded_order(dim_cuts) for dim_cuts in fixed]
    if any(cut.factor > 1 for dim_cuts in fixed for cut in dim_cuts) and None not in encoded:
        yield tuple(dim_cuts or () for dim_cuts in encoded)
    yield fixed


def _in_recorded_order(cuts: Cuts, mesh_dims: Sequence[int] | None) -> Cuts:
    if mesh_dims is None or list(mesh_dims) == sorted(mesh_dims):
        return cuts
    by_mesh_dim = {cut.mesh_dim: cut for cut in cuts}
    strided = any(cut.factor > 1 for cut in cuts)
    if strided or sorted(mesh_dims) != sorted(by_mesh_dim):
        raise Damaged(
            f"shard order {tuple(mesh_dims)} contradicts the placements on mesh dims "
            f"{tuple(by_mesh_dim)}"
        )
    return tuple(by_mesh_dim[mesh_dim] for mesh_dim in mesh_dims)


def _piece(spans: tuple[Span, ...]) -> Piece:
    shape = [length for _, _, length in spans]
    return Piece(
        Box.at([start for start, _, _ in spans], shape),
        Box.at([local for _, local, _ in spans], shape),
    )


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
