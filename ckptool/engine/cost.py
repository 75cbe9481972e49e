"""What a transfer reads, told without reading."""

from __future__ import annotations

import math

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, Packed
from ckptool.core.plan import Group, Plan
from ckptool.engine.gather import has_rows, span_of, worth_a_span
from ckptool.engine.sources import TILE


def bytes_to_read(plan: Plan) -> int:
    """Bytes that a run of the plan reads from the source's files, tile by tile.

    More than the tensors hold where a gap costs less than another read, or where several files
    need one chunk that must be decoded whole.
    """
    numbers = range(len(plan.layout.files))
    return sum(
        _group_bytes(plan, group)
        for batch in plan.batches(numbers)
        for group in plan.groups(batch, TILE)
    )


def _group_bytes(plan: Plan, group: Group) -> int:
    """Bytes that are read for parts that are cut in step; rows they share are read once."""
    entry = plan.catalog.tensors[group.spots[0].part.name]
    index, itemsize = plan.index(entry), entry.source_dtype.itemsize
    alone = 0
    shared: dict[tuple[int, int, int], int] = {}
    for spot in group.spots:
        for whole, _ in spot.part.pieces:
            for chunk, common in index.find(whole):
                local = common.relative_to(chunk.box.lo)
                if group.rows and has_rows(chunk, local, itemsize):
                    rows = math.prod(chunk.box.shape[1:]) * local.shape[0] * itemsize
                    shared[id(chunk), local.lo[0], local.hi[0]] = rows
                else:
                    alone += _box_bytes(chunk, local, itemsize)
    return alone + sum(shared.values())


def _box_bytes(chunk: Chunk, local: Box, itemsize: int) -> int:
    if isinstance(chunk.at, Packed):
        return chunk.at.nbytes
    if isinstance(chunk.at, Extent) and worth_a_span(local.shape, chunk.at.strides, itemsize):
        return span_of(local.shape, chunk.at.strides, itemsize)
    return local.volume * itemsize
