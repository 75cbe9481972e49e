"""Which boxes of a global tensor a plain tensor declares to hold, by attributes of its own.

torch 2.15's ``torch.distributed.checkpoint.CheckpointableTensor`` is any tensor with these four.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.core.box import Box
from ckptool.core.sharding.dtensor import Piece

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
    """Return which boxes of the tensor of ``global_shape`` lie where in that of ``local_shape``.

    Elements of the local tensor that no shard covers are padding. Raises ValueError where the
    numbers do not fit one another, as DCP does.
    """
    if not len(global_offsets) == len(local_offsets) == len(local_sizes):
        counts = f"{len(global_offsets)} global_offsets, {len(local_offsets)} local_offsets"
        raise ValueError(f"{counts} and {len(local_sizes)} local_sizes")
    shards = zip(global_offsets, local_offsets, local_sizes, strict=True)
    return tuple(
        Piece(
            _box(above, size, global_shape, "global_shape"),
            _box(inside, size, local_shape, "its own shape"),
        )
        for above, inside, size in shards
    )


def _box(offset: Sizes, size: Sizes, shape: Sizes, what: str) -> Box:
    """Return the box of a shard; ValueError where it does not lie within ``shape``."""
    if not len(offset) == len(size) == len(shape):
        raise ValueError(
            f"a shard of {len(size)} dims at an offset of {len(offset)} in {what} {list(shape)}"
        )
    box = Box.at(offset, size)
    if min((*offset, *size), default=0) < 0 or not Box.whole(shape).contains(box):
        raise ValueError(f"the shard {box} is outside {what} {list(shape)}")
    return box
