"""Compare tensors that are runs of bytes on both sides, however they are cut, without numpy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.check.pairs import (
    PairTile,
    SideReaders,
    TensorPair,
    address,
    bytes_at_a_time,
    pair_jobs,
    read_both,
    same_memory,
    tiles_of_jobs,
)
from ckptool.engine.read.segments import Segment, segments_of_tensor
from ckptool.engine.read.tiles import LARGE, ByteReader, Job
from ckptool.errors import CkptoolError
from ckptool.storage.local import TILE, Files, Run

_SMALL = 64 << 10
"""Bytes of a tensor up to which reading it costs less than planning that."""
_MOST = 512
"""Chunks that are read at once on each side, of at most a tile and a tensor."""
_GAP = 4 << 10
"""Bytes between two chunks that are read with them: less than a call of the kernel costs."""

_Span = tuple[int, int]
"""An address in memory, and a number of bytes."""


class PairBatch(NamedTuple):
    """Pairs that were compared, or some tiles of one: ``nbytes`` were read of both sides.

    All are equal but ``others``, which are yet to be compared tile by tile: those that differ, that
    cannot be read, or that are not runs of bytes as they are compared.
    """

    others: Iterator[tuple[TensorPair, Iterator[PairTile]]]
    nbytes: int


RunJob = Job[Any, SideReaders, Any]
"""Reads each ``PairTile`` of its subject, a pair; a ``PairBatch`` if there is none."""


def run_jobs(pairs: Iterable[TensorPair], sides: tuple[Files, Files]) -> Iterator[RunJob]:
    """Yield the jobs of pairs: on disks as runs of bytes, many small ones together.

    Reads of a store are planned singly. The chunks of every tensor must tile the part that is
    compared.
    """
    if any(files.block > 1 for files in sides):
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


class _Runs:
    """The bytes of a tensor in row-major order, as runs of files."""

    def __init__(self, runs: Sequence[Segment]) -> None:
        self._runs = runs
        self._ends = [*accumulate(run.nbytes for run in runs)]

    def read(self, reader: ByteReader, start: int, nbytes: int) -> int:
        """Read some of the bytes, and note them; return where they are in the reader's memory."""
        memory, filled = reader.memory(nbytes), 0
        at = bisect_right(self._ends, start)
        while filled < nbytes:
            file, offset, size, _, record = self._runs[at]
            skip = start + filled - (self._ends[at] - size)
            data = memory[filled : filled + size - skip]
            reader.read_into(file, offset + skip, data)
            if record is not None:
                reader.note(record, offset + skip, data)
            filled, at = filled + len(data), at + 1
        return address(memory)


class _LargePair:
    """A pair that several threads compare; whether it ``differs`` as far as any of them knows."""

    def __init__(self, pair: TensorPair) -> None:
        self.pair = pair
        self.differs = False
        self._runs: tuple[_Runs, _Runs] | None = None

    def runs(self) -> tuple[_Runs, _Runs] | None:
        """Return the runs of both sides; None if one has none, or they cannot be found.

        Threads that meet here both look for them, which costs less than waiting.
        """
        if self._runs is None:
            one, other = _runs_of(self.pair.one), _runs_of(self.pair.other)
            self._runs = None if one is None or other is None else (_Runs(one), _Runs(other))
        return self._runs


def _large_jobs(pair: TensorPair) -> Iterator[RunJob]:
    """Yield the jobs of one pair, each of some tiles."""
    large, start, itemsize = _LargePair(pair), 0, pair.one.source_dtype.itemsize
    at_a_time = bytes_at_a_time(pair)
    for boxes in tiles_of_jobs(pair):
        sizes = [box.volume * itemsize for box in boxes]
        compare = partial(_compare_large, large, boxes, sizes, start)
        yield Job(None, compare, nbytes=at_a_time)
        start += sum(sizes)


def _compare_large(
    large: _LargePair,
    boxes: Sequence[Box],
    sizes: Sequence[int],
    start: int,
    readers: SideReaders,
) -> Iterator[PairBatch]:
    """Compare tiles of a pair, of ``sizes`` bytes from ``start`` on, as runs up to a difference."""
    equal, at = 0, start
    while equal < len(boxes) and not large.differs:
        if not _is_same(large, at, sizes[equal], readers):
            large.differs = True  # for others; what is found here is not read from there
            break
        at, equal = at + sizes[equal], equal + 1
    left = boxes[equal:]
    others = [(large.pair, read_both(large.pair, left, readers))] if left else []
    yield PairBatch(iter(others), 2 * sum(sizes))


def _is_same(large: _LargePair, start: int, nbytes: int, readers: SideReaders) -> bool:
    """Return whether some bytes are runs on both sides, can be read, and are the same."""
    runs, (one, other) = large.runs(), readers.bytes
    if runs is None:
        return False
    try:
        places = runs[0].read(one, start, nbytes), runs[1].read(other, start, nbytes)
    except CkptoolError:
        return False
    return same_memory(*places, nbytes)


def _compare_small(pairs: Sequence[TensorPair], readers: SideReaders) -> Iterator[PairBatch]:
    """Compare those pairs of which both sides are runs of bytes that can be read."""
    some: list[TensorPair] = []
    ones, others = list[list[Segment]](), list[list[Segment]]()
    left: list[TensorPair] = []
    for pair in pairs:
        one, other = _runs_of(pair.one), _runs_of(pair.other)
        if one is None or other is None:
            left.append(pair)
        else:
            some.append(pair)
            ones.append(one)
            others.append(other)
    try:
        memories = _read(readers.bytes[0], ones), _read(readers.bytes[1], others)
        left += [
            pair
            for pair, one, other in zip(some, *memories, strict=True)
            if not _same_bytes(one, other)
        ]
    except CkptoolError:
        left = [*pairs]
    tiles = ((pair, job.read(readers)) for pair in left for job in pair_jobs([pair]))
    yield PairBatch(tiles, sum([pair.nbytes for pair in pairs]))


def _runs_of(entry: TensorEntry) -> list[Segment] | None:
    """Return the runs of a tensor; None if there are none, or they cannot be found."""
    try:
        return segments_of_tensor(entry)
    except CkptoolError:
        return None


class _Window(Struct):
    """Bytes ``start`` to ``end`` of a file that are read at once, to ``place`` in memory."""

    file: str
    start: int
    end: int
    place: int


def _read(reader: ByteReader, tensors: Sequence[list[Segment]]) -> list[list[_Span]]:
    """Read the runs of some tensors, those that are close in a file together.

    Returns where each is in memory, which the reader's next call may reuse.
    """
    window, windows = _Window("", 0, 0, 0), list[_Window]()
    places: dict[Run, int] = {}
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
    base = address(memory) if memory else 0
    for file, start, nbytes, _, record in chain.from_iterable(tensors):
        if record is not None:
            place = places[file, start, nbytes]
            reader.note(record, start, memory[place : place + nbytes])
    return [[(base + places[run[:3]], run[2]) for run in runs] for runs in tensors]


def _same_bytes(ones: Sequence[_Span], others: Sequence[_Span]) -> bool:
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
