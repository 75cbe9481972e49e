"""What a transfer will read, from its plan alone."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, EncodedBlob, Extent
from ckptool.core.plan import Group, Plan
from ckptool.engine.read.gather import has_rows, span_of, worth_a_span
from ckptool.storage.local import Files

_KEPT = 16 << 20

Run = tuple[str, int, int]
"""A file, and the offset and number of bytes that are read of it."""


def bytes_to_read(plan: Plan, source: Files) -> int:
    """Return the bytes that a run of the plan reads from the source's files, tile by tile.

    More than the tensors hold where a gap costs less than another read, or where several files
    need one chunk that must be decoded whole. Of a store whole blocks are read, and few are kept
    for what follows: the answer is then near, for threads that read side by side share some.
    """
    numbers = range(len(plan.layout.files))
    groups = (g for batch in plan.batches(numbers) for g in plan.groups(batch, source.tile))
    runs = (_group_runs(plan, group, source.block) for group in groups)
    if source.block == 1:
        return sum(nbytes for group in runs for _, _, nbytes in group)
    return _of_blocks(runs, source)


def _of_blocks(groups: Iterable[Iterable[Run]], source: Files) -> int:
    """Return the bytes of the blocks that are fetched, once for a group; the last are kept."""
    block = source.block
    kept: OrderedDict[tuple[str, int], None] = OrderedDict()
    total = 0
    for group in groups:
        touched = {
            (file, number): None
            for file, start, nbytes in group
            for number in range(start // block, (start + nbytes - 1) // block + 1)
        }
        for file, number in touched:
            if (file, number) not in kept:
                total += min(block, source.files[file] - number * block)
        kept.update(touched)
        for key in touched:
            kept.move_to_end(key)
        while len(kept) * block > _KEPT:
            kept.popitem(last=False)
    return total


def _group_runs(plan: Plan, group: Group, block: int) -> list[Run]:
    """Return what is read for parts that are cut in step; rows they share are read once."""
    entry = plan.catalog.tensors[group.parts[0].part.name]
    index, itemsize = plan.index(entry), entry.source_dtype.itemsize
    alone: list[Run] = []
    shared: dict[tuple[int, int, int], Run] = {}
    for spot in group.parts:
        for whole, _ in spot.part.pieces:
            for chunk, common in index.find(whole):
                local = common.relative_to(chunk.box.lo)
                if group.rows and has_rows(chunk, local, itemsize):
                    row = math.prod(chunk.box.shape[1:]) * itemsize
                    start = chunk.at.offset + local.lo[0] * row
                    run = (chunk.at.file, start, local.shape[0] * row)
                    shared[id(chunk), local.lo[0], local.hi[0]] = run
                else:
                    alone += _box_runs(chunk, local, itemsize, block)
    return [*alone, *shared.values()]


def _box_runs(chunk: Chunk, local: Box, itemsize: int, block: int) -> Iterator[Run]:
    at = chunk.at
    if not local.volume:
        return
    if isinstance(at, EncodedBlob):
        yield at.file, at.offset, at.nbytes
    elif isinstance(at, Extent):
        start = at.offset + sum(i * s for i, s in zip(local.lo, at.strides, strict=True))
        yield from _strided_runs(at.file, start, local.shape, at.strides, itemsize, block)
    else:
        yield at.file, at.offset, local.volume * itemsize


def _strided_runs(
    file: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, block: int
) -> Iterator[Run]:
    """Yield one read where that is worth it, else one for each index of the widest dim."""
    if worth_a_span(shape, strides, size, block):
        yield file, start, span_of(shape, strides, size)
        return
    if block == 1:
        yield file, start, math.prod(shape) * size
        return
    dim = max((d for d, n in enumerate(shape) if n > 1), key=lambda d: strides[d])
    inner = (*shape[:dim], 1, *shape[dim + 1 :])
    for at in range(shape[dim]):
        yield from _strided_runs(file, start + at * strides[dim], inner, strides, size, block)
