"""Runs of bytes: which of them are read for the elements of a box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckptool.core.box import Box, contiguous
from ckptool.core.catalog import (
    EncodedBlob,
    Extent,
    Place,
    Record,
    ScaledBlocks,
    TensorEntry,
)
from ckptool.core.sharding.groups import Tile
from ckptool.core.sharding.index import ChunkIndex
from ckptool.core.sharding.table import WholeTensor
from ckptool.engine.read.containers import Need, likely_place, open_place, openings
from ckptool.storage.local import Run

NotePiece = Callable[[Record, int, memoryview], None]
"""Called with each piece of a checksummed record: the record, the file offset and the bytes."""

_LONG_RUN = 2 << 10
_OVER_READ = 4
_PAGE = 4 << 10
"""Gaps shorter than this save the disk nothing."""


StoredRun = tuple[str, int, int, Record | None]
"""A file, the offset and number of bytes, and the record that they are a part of."""


def row_major_runs(entry: TensorEntry) -> list[StoredRun] | None:
    """Return the runs of bytes that are a whole tensor as stored, in row-major order.

    None if it is stored in another way. Opens the containers of its chunks.
    """
    chunks, itemsize = entry.chunks, entry.source_dtype.itemsize
    if isinstance(chunks, WholeTensor) and chunks.boxes[0].hi == entry.shape:
        if not contiguous(chunks.strides, entry.shape, itemsize):
            return None
        return [(chunks.file, chunks.offset, entry.elements * itemsize, None)]
    rest = entry.shape[1:]
    row, filled, runs = math.prod(rest) * itemsize, 0, list[StoredRun]()
    for chunk in chunks:
        (lo, hi), shape = chunk.box, chunk.box.shape
        if 0 in shape:
            continue
        at = open_place(chunk.at, shape)
        if not isinstance(at, Extent) or at.ops or not contiguous(at.strides, shape, itemsize):
            return None
        if shape[1:] != rest or (lo and (lo[0] != filled or any(lo[1:]))):
            return None
        filled = hi[0] if lo else 1
        runs.append((at.file, at.offset, shape[0] * row if lo else row, at.record))
    return runs if filled == (entry.shape[0] if entry.shape else 1) else None


def tile_runs(tiles: Sequence[Tile], block: int) -> Iterator[Need]:
    """Yield what is read for the tiles of a job.

    ``block`` is the least number of bytes that a read costs.
    """
    entry, band = tiles[0].entry, tiles[0].band
    if band is not None:
        yield from entry_runs(entry, [band], block)
        return
    for tile in tiles:
        for source in tile.sources:
            local = source.box.relative_to(source.chunk.box.lo)
            yield from place_runs(source.chunk.at, local, entry.source_dtype.itemsize, block)


def entry_runs(entry: TensorEntry, boxes: Iterable[Box], block: int) -> Iterator[Need]:
    """Yield what is read for boxes of a tensor; each packed blob once."""
    index, itemsize = ChunkIndex(entry), entry.source_dtype.itemsize
    blobs: set[EncodedBlob] = set()
    for box in boxes:
        for chunk, common in index.find(box):
            if isinstance(chunk.at, EncodedBlob):
                if chunk.at in blobs:
                    continue
                blobs.add(chunk.at)
            yield from place_runs(chunk.at, common.relative_to(chunk.box.lo), itemsize, block)


def place_runs(at: Place, local: Box, itemsize: int, block: int) -> Iterator[Need]:
    """Yield what is read for a box of the elements at a place, in their own coordinates."""
    if not local.volume:
        return
    yield from openings(at)
    at = likely_place(at, itemsize)
    if isinstance(at, EncodedBlob):
        yield at.file, at.offset, at.nbytes
    elif isinstance(at, Extent):
        start = at.offset + sum(i * s for i, s in zip(local.lo, at.strides, strict=True))
        yield from _strided_runs(at.file, start, local.shape, at.strides, itemsize, block)
    elif isinstance(at, ScaledBlocks):
        for entry in at.stored:
            yield from entry_runs(entry, [Box.whole(entry.shape)], block)
    else:
        yield at.file, at.offset, local.volume * itemsize


def _strided_runs(
    file: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, block: int
) -> Iterator[Run]:
    """Yield one read if that is worthwhile, else one for each index of the widest dim."""
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


def span_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes from the first to the last element of a box that has elements."""
    return itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def worth_a_span(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, block: int = 1
) -> bool:
    """Return whether one read across the gaps, into scratch, beats one read per run.

    It does if no gap saves a ``block``, the least number of bytes that a read costs, and short runs
    are in one page or a large share of what is between them.
    """
    span, nbytes = span_of(shape, strides, itemsize), math.prod(shape) * itemsize
    steps = [stride for n, stride in zip(shape, strides, strict=True) if n > 1]
    if span <= nbytes or max(steps, default=0) <= block:
        return True
    run = itemsize
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if stride == run:
            run *= size
    return run < _LONG_RUN and span * run <= max(_OVER_READ * run, _PAGE) * nbytes
