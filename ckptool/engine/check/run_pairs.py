"""Compare tensors that are runs of bytes on both sides, however they are cut, without numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from operator import mul

from msgspec import Struct

from ckptool.core.box import Box, row_major_strides
from ckptool.engine.check.pairs import (
    Failure,
    PairJob,
    PairTile,
    SideReaders,
    TensorPair,
    address,
    bytes_at_a_time,
    pair_jobs,
    read_both,
    read_sides,
    same_memory,
    tiles_of_jobs,
)
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.segments import Segment, cut_out, segments_of_tensor
from ckptool.engine.read.tiles import LARGE, Job
from ckptool.errors import CkptoolError
from ckptool.storage.files import TILE, Files, ReadSpan

_SMALL = 64 << 10
"""Bytes of a tensor up to which reading it costs less than planning that."""
_MOST = 512
"""Chunks that are read at once on each side, of at most a tile and a tensor."""
_GAP = 4 << 10
"""Bytes between two chunks that are read with them: less than a call of the kernel costs."""

Spans = list[tuple[int, int]]
"""Where some bytes are in memory, and how many."""


def run_jobs(pairs: Iterable[TensorPair], sides: tuple[Files, Files]) -> Iterator[PairJob]:
    """Yield the jobs of pairs: on disks as runs of bytes, many small ones together.

    Reads of a store are planned singly. The chunks of every tensor must tile the part that is
    compared.
    """
    if any(files.policy.by_request for files in sides):
        yield from pair_jobs(pairs)
        return
    some, nbytes, chunks = list[TensorPair](), 0, 0
    for pair in pairs:
        size = pair.one.elements * pair.one.source_dtype.itemsize
        if pair.boxes or not size or not _is_unchanged(pair):
            yield from pair_jobs([pair])
            continue
        if size > _SMALL:
            yield from _large_jobs(pair)
            continue
        some.append(pair)
        nbytes += size
        chunks += max(len(pair.one.chunks), len(pair.other.chunks))
        if nbytes >= TILE or chunks >= _MOST:
            yield Job(None, partial(_compare_small, some), nbytes=LARGE - 1)
            some, nbytes, chunks = [], 0, 0
    if some:
        yield Job(None, partial(_compare_small, some), nbytes=LARGE - 1)


def _is_unchanged(pair: TensorPair) -> bool:
    """Return whether both sides are compared as stored."""
    one, other = pair.one, pair.other
    return one.source_dtype is one.dtype is other.dtype is other.source_dtype


def _large_jobs(pair: TensorPair) -> Iterator[PairJob]:
    """Yield the jobs of one pair, each of some tiles.

    Threads that meet here may both look for its segments, which costs less than waiting.
    """
    find, at_a_time = cache(partial(_segments, pair)), bytes_at_a_time(pair)
    for boxes in tiles_of_jobs(pair):
        yield Job(None, partial(_compare_large, pair, find, boxes), nbytes=at_a_time)


def _compare_large(
    pair: TensorPair,
    find: Callable[[], _Segments | None],
    boxes: Sequence[Box],
    readers: SideReaders,
) -> Iterator[PairTile]:
    """Compare tiles of a pair as runs of bytes if both sides are such, else as elements."""
    segments, dtype = find(), pair.one.dtype
    if segments is None:
        yield from read_both(pair, boxes, readers)
        return
    strides = row_major_strides(pair.one.shape, dtype.itemsize)

    def read(side: int, box: Box) -> memoryview:
        memory = readers.bytes[side].memory(box.volume * dtype.itemsize)
        start = sum(map(mul, box.lo, strides))
        readers.bytes[side].read_segments(cut_out(segments[side], start, len(memory)), memory)
        return memory

    for nbytes, box, sides in read_sides(pair, boxes, read):
        if isinstance(sides, Failure):
            yield PairTile(nbytes, pair, box, failure=sides)
        elif same_memory(address(sides[0]), address(sides[1]), len(sides[0])):
            yield PairTile(nbytes)
        else:
            from ckptool.engine.read.gather import array

            one, other = (array(box.shape, dtype, memory) for memory in sides)
            yield PairTile(nbytes, pair, box, (one, other))


def _compare_small(pairs: Sequence[TensorPair], readers: SideReaders) -> Iterator[PairTile]:
    """Compare pairs as runs of bytes, and those that differ, or are no such, as elements."""
    found = [(pair, _segments(pair)) for pair in pairs]
    left = [pair for pair, segments in found if segments is None]
    runs = [(pair, *segments) for pair, segments in found if segments is not None]
    try:
        ones = read_close(readers.bytes[0], [one for _, one, _ in runs])
        others = read_close(readers.bytes[1], [other for _, _, other in runs])
        same = map(_same_bytes, _addresses(*ones), _addresses(*others))
        left += [pair for (pair, _, _), is_same in zip(runs, same, strict=True) if not is_same]
    except CkptoolError:
        left = [*pairs]
    yield PairTile(sum([pair.nbytes for pair in pairs]) - sum([pair.nbytes for pair in left]))
    for pair in left:
        for boxes in tiles_of_jobs(pair):
            yield from read_both(pair, boxes, readers)


_Segments = tuple[list[Segment], list[Segment]]
"""Those of both sides of a pair."""


def _segments(pair: TensorPair) -> _Segments | None:
    """Return the segments of both sides; None if one has none, or they cannot be found."""
    try:
        one = segments_of_tensor(pair.one)
        other = None if one is None else segments_of_tensor(pair.other)
    except CkptoolError:
        return None
    return None if one is None or other is None else (one, other)


class _Window(Struct):
    """Bytes ``start`` to ``end`` of a file that are read at once, to ``place`` in memory."""

    file: str
    start: int
    end: int
    place: int


def read_close(
    reader: ByteReader, tensors: Sequence[list[Segment]]
) -> tuple[memoryview, list[Spans]]:
    """Read the runs of some tensors, those that are close in a file together.

    Returns memory, which the reader's next call may reuse, and where each run is in it.
    """
    window, windows = _Window("", 0, 0, 0), list[_Window]()
    places: dict[ReadSpan, int] = {}
    for file, start, nbytes in sorted({run[:3] for runs in tensors for run in runs}):
        if file != window.file or start > window.end + _GAP:
            window = _Window(file, start, start, window.place + window.end - window.start)
            windows.append(window)
        places[file, start, nbytes] = window.place + start - window.start
        window.end = max(window.end, start + nbytes)
    memory = reader.memory(window.place + window.end - window.start)
    for window in windows:
        part = memory[window.place : window.place + window.end - window.start]
        reader.read_into(window.file, window.start, part)
    for file, start, nbytes, _, record in chain.from_iterable(tensors):
        if record is not None:
            place = places[file, start, nbytes]
            reader.note(record, start, memory[place : place + nbytes])
    return memory, [[(places[run[:3]], run[2]) for run in runs] for runs in tensors]


def _addresses(memory: memoryview, tensors: Iterable[Spans]) -> Iterator[Spans]:
    """Yield the addresses of bytes that are at places in memory."""
    base = address(memory) if memory else 0
    return ([(base + place, nbytes) for place, nbytes in spans] for spans in tensors)


def _same_bytes(ones: Spans, others: Spans) -> bool:
    """Return whether spans of memory hold the same bytes as others, however they are cut."""
    left = [*reversed(others)]
    for one, nbytes in ones:
        while nbytes:
            if not left:
                return False
            other, count = left.pop()
            some = min(nbytes, count)
            if not same_memory(one, other, some):
                return False
            if count > some:
                left.append((other + some, count - some))
            one, nbytes = one + some, nbytes - some
    return not left
