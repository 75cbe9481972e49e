"""What is read for elements: found once, to be announced, counted, read and checked.

Two questions decide how: whether elements are stored as one run of bytes (``is_run``), and whether
they go to one run of memory (``skips_in``). If both are so, a ``Segment`` says all. Other elements
of a file are read as ``strided_reads`` says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter, mul
from typing import NamedTuple, TypeGuard

from ckptool.core.box import Box, contiguous, solid_places
from ckptool.core.catalog import Computed, EncodedBlob, Extent, Place, Record, TensorEntry
from ckptool.core.chunks import Chunks, Run, RunChunks, chunks_of
from ckptool.core.planning.groups import Tile
from ckptool.core.sharding.index import ChunkIndex, Overlap, as_key
from ckptool.engine.read.computed import region_of
from ckptool.engine.read.containers import Need, likely_place, open_place, openings

NotePiece = Callable[[Record, int, memoryview], None]
"""Called with each piece of a checksummed record: the record, the file offset and the bytes."""

_LONG_RUN = 2 << 10
"""Bytes of a run from which on it is read by itself: that then takes no longer than the gaps."""
_OVER_READ = 4
"""Times the bytes of shorter runs that one read across their gaps may have, and still be faster."""
_FEW = 1024
"""Chunks up to which tensors that are cut alike share the order of their rows."""
_PAGE = 4 << 10
"""Gaps shorter than this save the disk nothing."""


class Segment(NamedTuple):
    """A run of bytes of a file that goes to one of memory, ``skip`` bytes after its beginning.

    ``record`` is the checksummed record that it is a part of.
    """

    file: str
    offset: int
    nbytes: int
    record: Record | None
    skip: int


_SKIP = attrgetter("skip")


def is_run(at: Place, shape: tuple[int, ...], itemsize: int) -> TypeGuard[Extent]:
    """Return whether elements of ``shape`` are one run of bytes of a place, in order, as stored."""
    return isinstance(at, Extent) and not at.ops and contiguous(at.strides, shape, itemsize)


def run_at(at: Place, local: Box, itemsize: int) -> int | None:
    """Return the file offset of the run of bytes that a box of a place is; None if it is no run.

    ``local`` is the box, in the coordinates of the place's elements.
    """
    if not is_run(at, local.shape, itemsize):
        return None
    inside: int = sum(map(mul, local.lo, at.strides))
    return at.offset + inside


@lru_cache(maxsize=64)
def skips_in(shape: tuple[int, ...], itemsize: int) -> Callable[[Box], int | None]:
    """Return a function of a box: how many bytes of an array precede it; None if not whole rows.

    Rows are what the first dim of more than one index counts.
    """
    dim = next((dim for dim, size in enumerate(shape) if size > 1), len(shape))
    rest = shape[dim + 1 :]
    row = math.prod(rest) * itemsize

    def skip(where: Box) -> int | None:
        if where.shape[dim + 1 :] != rest:
            return None
        return where.lo[dim] * row if dim < len(shape) else 0

    return skip


def segments_of(
    overlaps: Iterable[Overlap], shape: tuple[int, ...], itemsize: int
) -> list[Segment] | None:
    """Return the segments that fill an array of ``shape``, one for each opened chunk in its box.

    None if a chunk's part of the box is no run of bytes.
    """
    segments, skip_to = [], skips_in(shape, itemsize)
    for chunk, _, local, where in overlaps:
        at, skip = chunk.at, skip_to(where)
        start = None if skip is None else run_at(at, local, itemsize)
        if start is None or skip is None or not isinstance(at, Extent):
            return None
        segments.append(Segment(at.file, start, local.volume * itemsize, at.record, skip))
    return segments


def segments_of_tensor(entry: TensorEntry) -> list[Segment] | None:
    """Return the segments of a whole tensor as stored, in order; None if any chunk is none.

    Opens the containers of its chunks, which must not overlap.
    """
    chunks, shape, itemsize = chunks_of(entry), entry.shape, entry.source_dtype.itemsize
    if chunks.extent is not None and chunks.boxes[0].hi == shape:
        file, offset, strides = chunks.extent
        if not contiguous(strides, shape, itemsize):
            return None
        return [Segment(file, offset, entry.elements * itemsize, None, 0)]
    find = _rows_of_few if len(chunks) <= _FEW else _rows_of
    rows = find(as_key(chunks.boxes), shape, itemsize)
    runs = None if rows is None else runs_of_chunks(chunks, itemsize)
    if rows is None or runs is None:
        return None
    return [Segment(*runs[at], skip) for at, skip in rows]


def runs_of_chunks(chunks: Chunks, itemsize: int) -> list[Run] | None:
    """Return the run of bytes that each chunk is as stored; None if any is none.

    Opens the containers of the chunks.
    """
    if isinstance(chunks, RunChunks):
        return [*chunks.runs()]
    runs = list[Run]()
    for chunk in chunks:
        shape = chunk.box.shape
        at, nbytes = open_place(chunk.at, shape), math.prod(shape) * itemsize
        if is_run(at, shape, itemsize):
            runs.append((at.file, at.offset, nbytes, at.record))
        elif not nbytes:
            runs.append((at.file, at.offset, 0, None))
        else:
            return None
    return runs


def _rows_of(
    boxes: Sequence[Box], shape: tuple[int, ...], itemsize: int
) -> list[tuple[int, int]] | None:
    """Return the numbers of boxes in the order of their rows, each with the bytes that precede it.

    None if a box is not whole rows of an array of ``shape``, or boxes overlap or leave a gap.
    """
    skip_to, reached = skips_in(shape, itemsize), 0
    skips = [(skip_to(boxes[at]), at) for at in solid_places(boxes)]
    rows = sorted((skip, at) for skip, at in skips if skip is not None)
    for skip, at in rows:
        if skip != reached:
            return None
        reached += boxes[at].volume * itemsize
    is_all = len(rows) == len(skips) and reached == math.prod(shape) * itemsize
    return [(at, skip) for skip, at in rows] if is_all else None


_rows_of_few = lru_cache(maxsize=64)(_rows_of)
"""The same, once for all tensors that are cut alike."""


def cut_out(segments: Sequence[Segment], start: int, nbytes: int) -> Iterator[Segment]:
    """Yield the segments of a range of the bytes that segments, in order, fill without a gap."""
    at, end = bisect_right(segments, start, key=_SKIP) - 1, start + nbytes
    while start < end:
        file, offset, size, record, skip = segments[at]
        inside = start - skip
        size = min(size - inside, end - start)
        yield Segment(file, offset + inside, size, record, start - (end - nbytes))
        start, at = start + size, at + 1


class StridedRead(NamedTuple):
    """``runs`` of ``nbytes`` bytes each that are read together, ``step`` bytes from each other.

    The first is ``offset`` bytes behind the first element. ``inside`` are the elements that they
    contain, as slices of the dims in the order of their strides.
    """

    inside: tuple[slice, ...]
    offset: int
    nbytes: int
    runs: int = 1
    step: int = 0


def strided_reads(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    block: int,
    most: tuple[float, float] = (math.inf, math.inf),
) -> Iterator[StridedRead]:
    """Yield the reads for elements, given their dims from the widest stride to the narrowest.

    One read across gaps where that is worthwhile, else one for each run, of many runs at once.
    ``block`` is the least number of bytes that a read costs; ``most`` are the bytes that a read
    across gaps may have, and one without gaps.
    """
    parts = [(tuple(slice(0, size) for size in shape), 0)]
    while parts:
        dims, offset = parts.pop()
        shape = tuple(indices.stop - indices.start for indices in dims)
        nbytes, span = math.prod(shape) * itemsize, span_of(shape, strides, itemsize)
        is_worth = worth_a_span(shape, strides, itemsize, block)
        if contiguous(strides, shape, itemsize) and nbytes <= most[1]:
            yield StridedRead(dims, offset, nbytes)
            continue
        if is_worth and span <= most[0]:
            yield StridedRead(dims, offset, span)
            continue
        dim = next(dim for dim, size in enumerate(shape) if size > 1)
        size, stride, inner = shape[dim], strides[dim], shape[dim + 1 :]
        if not is_worth and contiguous(strides[dim + 1 :], inner, itemsize) and nbytes <= most[1]:
            yield StridedRead(dims, offset, nbytes // size, size, stride)
            continue
        start, half = dims[dim].start, size // 2
        for low, high in ((half, size), (0, half)):  # the lower half is taken next
            part = (*dims[:dim], slice(start + low, start + high), *dims[dim + 1 :])
            parts.append((part, offset + low * stride))


def by_stride(strides: tuple[int, ...]) -> list[int]:
    """Return the dims from the widest stride to the narrowest."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


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


def tile_needs(tiles: Iterable[Tile], block: int) -> Iterator[Need]:
    """Yield the reads for the tiles of a job, if a read costs at least ``block`` bytes.

    A band, or a small tensor, is read once for all of its tiles, which follow each other.
    """
    last = None
    for tile in tiles:
        if tile.band is None:
            yield from _needs(tile.sources, tile.entry.source_dtype.itemsize, block, set())
        elif tile.entry is not last:
            yield from entry_needs(tile.entry, [tile.band], block)
            last = tile.entry


def entry_needs(entry: TensorEntry, boxes: Iterable[Box], block: int) -> Iterator[Need]:
    """Yield the reads for boxes of a tensor; each packed blob is read once."""
    index, blobs = ChunkIndex(entry), set[Place]()
    for box in boxes:
        yield from _needs(index.find(box), entry.source_dtype.itemsize, block, blobs)


def _needs(
    overlaps: Iterable[Overlap], itemsize: int, block: int, blobs: set[Place]
) -> Iterator[Need]:
    """Yield the reads for the parts of a box that chunks hold; packed ``blobs`` are read once."""
    for chunk, _, local, _ in overlaps:
        if isinstance(chunk.at, EncodedBlob):
            if chunk.at in blobs:
                continue
            blobs.add(chunk.at)
        yield from place_needs(chunk.at, local, itemsize, block)


def place_needs(at: Place, local: Box, itemsize: int, block: int) -> Iterator[Need]:
    """Yield the reads for a box of the elements at a place, in their own coordinates."""
    if not local.volume:
        return
    yield from openings(at)
    at = likely_place(at, itemsize)
    if isinstance(at, EncodedBlob):
        yield at.file, at.offset, at.nbytes
    elif isinstance(at, Extent):
        start = at.offset + sum(map(mul, local.lo, at.strides))
        order, shape = by_stride(at.strides), local.shape
        sizes, strides = tuple(shape[d] for d in order), tuple(at.strides[d] for d in order)
        for _, offset, nbytes, runs, step in strided_reads(sizes, strides, itemsize, block):
            for first in range(start + offset, start + offset + runs * (step or 1), step or 1):
                yield at.file, first, nbytes
    elif isinstance(at, Computed):
        region, _, _ = region_of(at.part, local)
        for entry, box in at.needs(region):
            yield from entry_needs(entry, [box], block)
    else:
        yield at.file, at.offset, local.volume * itemsize
