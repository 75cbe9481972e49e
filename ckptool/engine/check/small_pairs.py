"""Compare many small tensors at once: both sides read in long runs, then byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from ckptool.core.catalog import TensorEntry
from ckptool.engine.check.pairs import PairTile, SideReaders, TensorPair, pair_jobs, same_memory
from ckptool.engine.read.gather import Gatherer
from ckptool.engine.read.runs import StoredRun, row_major_runs
from ckptool.engine.read.tiles import LARGE, Job
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
    """Pairs that were compared: ``nbytes`` were read of both sides.

    All are equal but ``others``, which are yet to be compared tile by tile: those that differ, that
    cannot be read, or that are not runs of bytes as they are compared.
    """

    others: Iterator[tuple[TensorPair, Iterator[PairTile]]]
    nbytes: int


BatchedJob = Job[Any, SideReaders, Any]
"""Reads each ``PairTile`` of its subject, a pair; a ``PairBatch`` if there is none."""


def batched_pair_jobs(
    pairs: Iterable[TensorPair], sides: tuple[Files, Files]
) -> Iterator[BatchedJob]:
    """Yield the jobs of pairs; on disks, small ones together. Reads of a store are planned singly.

    The chunks of every tensor must tile the part that is compared.
    """
    if any(files.block > 1 for files in sides):
        yield from pair_jobs(pairs)
        return
    some, nbytes, chunks = list[TensorPair](), 0, 0
    for pair in pairs:
        size = pair.one.elements * pair.one.source_dtype.itemsize
        if pair.boxes or not 0 < size <= _SMALL or not _is_unchanged(pair):
            yield from pair_jobs([pair])
            continue
        some.append(pair)
        nbytes += size
        chunks += max(len(pair.one.chunks), len(pair.other.chunks))
        if nbytes >= TILE or chunks >= _MOST:
            yield Job(None, partial(_compare, some), nbytes=LARGE - 1)
            some, nbytes, chunks = [], 0, 0
    if some:
        yield Job(None, partial(_compare, some), nbytes=LARGE - 1)


def _is_unchanged(pair: TensorPair) -> bool:
    """Return whether both sides are compared as stored."""
    one, other = pair.one, pair.other
    return one.source_dtype is one.dtype is other.dtype is other.source_dtype


def _compare(pairs: Sequence[TensorPair], readers: SideReaders) -> Iterator[PairBatch]:
    """Compare those pairs of which both sides are runs of bytes that can be read."""
    some: list[TensorPair] = []
    ones, others = list[list[StoredRun]](), list[list[StoredRun]]()
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
        memories = _read(readers.one, ones), _read(readers.other, others)
        left += [
            pair
            for pair, one, other in zip(some, *memories, strict=True)
            if not _same_bytes(one, other)
        ]
    except CkptoolError:
        left = [*pairs]
    tiles = ((pair, job.read(readers)) for pair in left for job in pair_jobs([pair]))
    yield PairBatch(tiles, sum([pair.nbytes for pair in pairs]))


def _runs_of(entry: TensorEntry) -> list[StoredRun] | None:
    """Return the runs of a tensor; None if there are none, or they cannot be found."""
    try:
        return row_major_runs(entry)
    except CkptoolError:
        return None


class _Window(Struct):
    """Bytes ``start`` to ``end`` of a file that are read at once, to ``place`` in memory."""

    file: str
    start: int
    end: int
    place: int


def _read(gatherer: Gatherer, tensors: Sequence[list[StoredRun]]) -> list[list[_Span]]:
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
    memory = gatherer.memory(window.place + window.end - window.start)
    for window in windows:
        part = memory[window.place : window.place + window.end - window.start]
        gatherer.read_into(window.file, window.start, part)
    base = np.frombuffer(memory, "u1").ctypes.data
    for file, start, nbytes, record in chain.from_iterable(tensors):
        if record is not None:
            place = places[file, start, nbytes]
            gatherer.note(record, start, memory[place : place + nbytes])
    return [[(base + places[run[:3]], run[2]) for run in runs] for runs in tensors]


def _same_bytes(ones: Sequence[_Span], others: Sequence[_Span]) -> bool:
    """Return whether spans of memory hold the same bytes as others, however they are cut."""
    left = [*reversed(others)]
    for address, nbytes in ones:
        while nbytes:
            if not left:
                return False
            other, count = left.pop()
            some = min(nbytes, count)
            if not same_memory(address, other, some):
                return False
            if count > some:
                left.append((other + some, count - some))
            address, nbytes = address + some, nbytes - some
    return not left
