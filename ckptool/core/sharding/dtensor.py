"""Which box of a tensor lies where on which rank: the forward rule of torch's DTensor.

Each tensor dim is cut on its own: first into index runs per mesh coordinate, then the runs of all
dims are combined into pieces.

``_StridedShard`` has two readings, and a record does not say which one its writer used. FSDP2 over
tensor parallelism (torch 2.4 to 2.13) writes ``[_StridedShard(0, 2), Shard(0)]`` but cuts the plain
``Shard`` first; ``distribute_tensor`` (torch 2.13) really cuts from left to right. Both give the
same rows when the sizes divide, and differ for example for 9 rows on a 4x2 mesh.

A plain tensor may declare its boxes itself, by attributes: torch 2.15's
``torch.distributed.checkpoint.CheckpointableTensor`` is any tensor with these four.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from ckptool.core.box import Box, Piece, pieces_of_runs
from ckptool.core.mesh import Placement, coordinate_of
from ckptool.core.sharding.cuts import (
    Cuts,
    Runs,
    cuts_by_dim,
    encoded_order,
    place_runs,
    runs_table,
    table_index,
    total_length,
    whole,
)
from ckptool.errors import Damaged

_MOST_STRIPES = 1 << 16
_MOST_STRIPES_A_POSITION = 8
"""No real mesh makes more, but numbers in a hostile file would, in minutes and gigabytes."""

ShardOrder = Sequence[tuple[int, Sequence[int]]]
"""torch 2.13's ``DTensorSpec.shard_order``: (tensor dim, mesh dims in the order they cut)."""


class LocalShard(Struct, frozen=True):
    """The content of one mesh position: the local tensor's shape and the origin of its parts.

    An empty shard has a 0 in ``shape`` and no pieces. There are several pieces if the rows of a
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

    Raises Damaged if the arguments contradict one another (a recorded shape that no reading
    gives, a dim out of range) and Unsupported for a partial placement.
    """
    recorded = tuple([(at, tuple(sizes)) for at, sizes in (local_shapes or {}).items()])
    order = tuple([(dim, tuple(dims)) for dim, dims in shard_order or ()])
    return _recorded_shards(tuple(shape), tuple(mesh_shape), tuple(placements), recorded, order)


@lru_cache(maxsize=32)
def _recorded_shards(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    recorded: tuple[tuple[int, tuple[int, ...]], ...],
    order: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[LocalShard, ...]:
    """Return the shard of each position; a checkpoint has many tensors that are cut alike."""
    return _every_shard(_decide(shape, mesh_shape, placements, dict(recorded), order))


def shard_at(
    position: int,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    local_shape: Sequence[int],
    shard_order: ShardOrder | None = None,
) -> LocalShard:
    """Return the shard of row-major ``position`` alone, as ``local_shards`` does for all.

    ``local_shape`` is that of this position; those of the others are unknown.
    """
    local_shapes = {position: local_shape}
    reading = _decide(shape, mesh_shape, placements, local_shapes, shard_order)
    return reading.shard(reading.runs_at(position))


_Misfit = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A mesh position, the local shape expected there, and the recorded one."""


class _Reading(Struct, frozen=True):
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
        pieces = pieces_of_runs([place_runs(dim_runs) for dim_runs in runs])
        return LocalShard(tuple(map(total_length, runs)), pieces)

    def first_misfit(self, recorded: Mapping[int, Sequence[int]]) -> _Misfit | None:
        """Find the first position whose recorded local shape is not the one this reading gives."""
        for position, shape in sorted(recorded.items()):
            expected = self.local_shape(position)
            if expected != tuple(shape):
                return position, expected, tuple(shape)
        return None


@lru_cache(maxsize=32)
def _every_shard(reading: _Reading) -> tuple[LocalShard, ...]:
    """Return the shards of all positions. Positions with the same runs share one object."""
    by_runs: dict[tuple[Runs, ...], LocalShard] = {}
    shards = []
    for position in range(math.prod(reading.mesh_shape)):
        runs = reading.runs_at(position)
        if runs not in by_runs:
            by_runs[runs] = reading.shard(runs)
        shards.append(by_runs[runs])
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
    recorded = local_shapes or {}
    _check_positions(recorded, sizes)
    misfits = []
    for ordered in _orders(cuts, dict(shard_order or ())):
        reading = _Reading(tuple(shape), sizes, ordered)
        misfit = reading.first_misfit(recorded)
        if misfit is None:
            return reading
        misfits.append(misfit)
    raise _no_reading(max(misfits), shape, sizes, placements)


def _no_reading(
    misfit: _Misfit, shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement]
) -> Damaged:
    position, expected, recorded = misfit
    names = ", ".join(map(str, placements))
    return Damaged(
        f"mesh position {position} of {'x'.join(map(str, sizes))} holds a local tensor of "
        f"shape {list(recorded)}, but {names} of a tensor of shape {list(shape)} gives "
        f"{list(expected)}"
    )


def _check_stripes(shape: Sequence[int], sizes: Sequence[int], cuts: tuple[Cuts, ...]) -> None:
    """Raise Damaged for split factors that make more stripes than any real mesh."""
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


SHARD_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The attributes that declare it, in the order ``declared_pieces`` takes them."""

Sizes = Sequence[int]


def declared_pieces(
    global_shape: Sizes,
    global_offsets: Sequence[Sizes],
    local_offsets: Sequence[Sizes],
    local_sizes: Sequence[Sizes],
    local_shape: Sizes,
) -> tuple[Piece, ...]:
    """Return the boxes of the global tensor with their places in the local one, by their shapes.

    Elements of the local tensor that no shard covers are padding. Raises ValueError if the numbers
    do not fit one another, as DCP does.
    """
    if not len(global_offsets) == len(local_offsets) == len(local_sizes):
        counts = f"{len(global_offsets)} global_offsets, {len(local_offsets)} local_offsets"
        raise ValueError(f"{counts} and {len(local_sizes)} local_sizes")
    shards = zip(global_offsets, local_offsets, local_sizes, strict=True)
    return tuple(
        Piece(
            _box(offset, size, global_shape, "global_shape"),
            _box(local_offset, size, local_shape, "its own shape"),
        )
        for offset, local_offset, size in shards
    )


def _box(offset: Sizes, size: Sizes, shape: Sizes, what: str) -> Box:
    """Return the box of a shard; ValueError if it is not within ``shape``."""
    if not len(offset) == len(size) == len(shape):
        raise ValueError(
            f"a shard of {len(size)} dims at an offset of {len(offset)} in {what} {list(shape)}"
        )
    box = Box.at(offset, size)
    if min((*offset, *size), default=0) < 0 or not Box.whole(shape).contains(box):
        raise ValueError(f"the shard {box} is outside {what} {list(shape)}")
    return box
