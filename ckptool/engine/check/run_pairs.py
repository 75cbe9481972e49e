"""Compare small tensors as runs of bytes, many together and however they are cut: without numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from ckptool.engine.check.pairs import (
    PairJob,
    PairTile,
    SideReaders,
    TensorPair,
    pair_jobs,
    read_both,
    tiles_of_jobs,
)
from ckptool.engine.read.segments import Segment, segments_of_tensor
from ckptool.engine.read.tiles import SMALL, Job
from ckptool.errors import CkptoolError
from ckptool.storage.files import TILE, Files

_SMALL = 64 << 10
"""Bytes of a tensor up to which reading it costs less than planning that."""
_MOST = 512
"""Chunks that are read at once on each side, of at most a tile and a tensor."""


def run_jobs(pairs: Iterable[TensorPair], sides: tuple[Files, Files]) -> Iterator[PairJob]:
    """Yield the jobs of pairs: on disks small ones as runs of bytes, many together.

    Reads of a store are planned singly. The chunks of every tensor must tile the part that is
    compared.
    """
    if any(files.policy.by_request for files in sides):
        yield from pair_jobs(pairs)
        return
    batch, nbytes, chunks = list[TensorPair](), 0, 0
    for pair in pairs:
        size = pair.one.elements * pair.one.source_dtype.itemsize
        if pair.boxes or not 0 < size <= _SMALL or not pair.is_plain:
            yield from pair_jobs([pair])
            continue
        batch.append(pair)
        nbytes += size
        chunks += max(len(pair.one.chunks), len(pair.other.chunks))
        if nbytes >= TILE or chunks >= _MOST:
            yield Job(None, partial(_compare_small, batch), nbytes=SMALL)
            batch, nbytes, chunks = [], 0, 0
    if batch:
        yield Job(None, partial(_compare_small, batch), nbytes=SMALL)


def _compare_small(pairs: Sequence[TensorPair], readers: SideReaders) -> Iterator[PairTile]:
    """Compare pairs as runs of bytes; those that differ, or are no runs, as elements."""
    rows = [(pair, _rows(pair)) for pair in pairs]
    rest = [pair for pair, sides in rows if sides is None]
    runs = [(pair, *sides) for pair, sides in rows if sides is not None]
    try:
        data_of_one = iter(readers.one.read_close(run[:3] for _, one, _ in runs for run in one))
        data = iter(readers.other.read_close(run[:3] for _, _, other in runs for run in other))
        for pair, one, other in runs:
            joined = b"".join(islice(data_of_one, len(one)))
            if joined != b"".join(islice(data, len(other))):
                rest.append(pair)
    except CkptoolError:  # one by one, to find which of them cannot be read
        rest = [*pairs]
    yield PairTile(sum([pair.nbytes for pair in pairs]) - sum([pair.nbytes for pair in rest]))
    for pair in rest:
        for boxes in tiles_of_jobs(pair):
            yield from read_both(pair, boxes, readers)


def _rows(pair: TensorPair) -> tuple[list[Segment], list[Segment]] | None:
    """Return the runs that each side is; None if a side is no runs, or they cannot be found."""
    try:
        one = segments_of_tensor(pair.one)
        other = None if one is None else segments_of_tensor(pair.other)
    except CkptoolError:
        return None
    return None if one is None or other is None else (one, other)
