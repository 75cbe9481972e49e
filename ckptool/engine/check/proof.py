"""Prove that written tensors are what was read for them, without reading the source again.

While they were written, the checksum of each run of bytes was taken as it came from the source. Now
each such run is read from the output, from wherever that has the same elements of the same tensor,
and its checksum is compared. So whatever a transfer does between the two is proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import add
from typing import NamedTuple

from ckptool.core.box import Box, flat_range
from ckptool.core.catalog import Chunk
from ckptool.core.layout import tiles
from ckptool.core.sharding.index import ChunkIndex
from ckptool.engine.check.pairs import (
    Failure,
    PairJob,
    PairTile,
    SideReaders,
    TensorPair,
    read_both,
    same_bits,
)
from ckptool.engine.check.run_pairs import read_close, run_jobs
from ckptool.engine.read.containers import Need, open_place
from ckptool.engine.read.segments import (
    Segment,
    cut_out,
    entry_needs,
    is_run,
    segments_of_tensor,
    skips_in,
)
from ckptool.engine.read.sums import ReadSums, checksum
from ckptool.engine.read.tiles import PAIR_TILE, Job, RunsOf, known_runs
from ckptool.errors import CkptoolError
from ckptool.storage.file_status import changed
from ckptool.storage.files import Files

_MOST = 512
"""Runs that are read at once."""


class _Run(NamedTuple):
    """Elements ``start`` to ``stop`` of a chunk's ``box``, in its order, and their checksum.

    The chunk is in ``file`` of the source.
    """

    file: str
    box: Box
    start: int
    stop: int
    checksum: int

    @property
    def boxes(self) -> list[Box]:
        """The elements as boxes of the tensor, in order."""
        found = flat_range(self.box.shape, self.start, self.stop)
        return [Box(*(tuple(map(add, self.box.lo, side)) for side in box)) for box in found]


class _Task(NamedTuple):
    """A run that is proved: its pair, and the segments of all that is written, if it has such."""

    pair: TensorPair
    written: list[Segment] | None
    run: _Run

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return (self.run.stop - self.run.start) * self.pair.one.dtype.itemsize


def proof_jobs(
    pairs: Iterable[TensorPair], sums: ReadSums, sides: tuple[Files, Files]
) -> Iterator[PairJob]:
    """Yield the jobs that prove pairs of read and written tensors by what was read of the first.

    Compared instead, so that the source is read again, are tensors that a transfer computes or
    casts, and those of which something else was read than runs of what is written.
    """
    compared, tasks, nbytes = list[TensorPair](), list[_Task](), 0
    for pair in pairs:
        runs = _runs_read(pair, sums)
        if runs is None:
            compared.append(pair)
            continue
        by_request = sides[1].policy.by_request  # each read of a store is announced by itself
        written = None if by_request else segments_of_tensor(pair.other)
        for run in runs:
            tasks.append(_Task(pair, written, run))
            nbytes += tasks[-1].nbytes
            if nbytes >= PAIR_TILE or len(tasks) >= _MOST:
                yield _job(tasks, nbytes)
                tasks, nbytes = [], 0
    if tasks:
        yield _job(tasks, nbytes)
    yield from run_jobs(compared, sides)


def _job(tasks: Sequence[_Task], nbytes: int) -> PairJob:
    written: RunsOf = partial(_needs, tasks)
    return Job(None, partial(_prove, tasks), [known_runs(), written], nbytes // len(tasks))


def _runs_read(pair: TensorPair, sums: ReadSums) -> list[_Run] | None:
    """Return runs that were read of a tensor and are all of what is written; None if none are."""
    size = pair.one.dtype.itemsize
    if not pair.is_plain:
        return None
    found, covered = list[_Run](), 0
    for chunk in _chunks_of(pair):
        shape = chunk.box.shape
        at = open_place(chunk.at, shape)
        if not is_run(at, shape, size):
            return None
        reached, end = at.offset, at.offset + chunk.box.volume * size
        for offset, nbytes, read in sums.runs(at.file, reached, end):
            if offset + nbytes <= reached:
                continue
            start, rest = divmod(offset - at.offset, size)
            if rest or nbytes % size:
                return None
            covered += offset + nbytes - max(reached, offset)
            reached = offset + nbytes
            found.append(_Run(at.file, chunk.box, start, start + nbytes // size, read))
    wanted = sum(box.volume for box in pair.boxes) if pair.boxes else pair.one.elements
    is_all = covered == wanted * size and (not pair.boxes or _are_written(pair, found))
    return found if is_all else None


def _chunks_of(pair: TensorPair) -> Iterable[Chunk]:
    """Return the chunks of the tensor that was read which have something of what is written."""
    if not pair.boxes:
        return pair.one.chunks
    index = ChunkIndex(pair.one)
    found = (each.chunk for box in pair.boxes for each in index.find(box))
    return {id(chunk): chunk for chunk in found}.values()


def _are_written(pair: TensorPair, runs: Iterable[_Run]) -> bool:
    """Return whether the chunks of the written tensor contain all elements of some runs."""
    index = ChunkIndex(pair.other)
    return all(
        sum(each.box.volume for each in index.find(box)) == box.volume
        for run in runs
        for box in run.boxes
    )


def _needs(tasks: Iterable[_Task], block: int) -> Iterator[Need]:
    """Yield what is read of the output for some runs."""
    for task in tasks:
        yield from entry_needs(task.pair.other, task.run.boxes, block)


def _prove(tasks: Sequence[_Task], readers: SideReaders) -> Iterator[PairTile]:
    """Prove runs: those of bytes, of which many are read together, then the others."""
    straight, scattered = list[tuple[_Task, list[Segment]]](), list[_Task]()
    for task in tasks:
        segments = _segments_of(task)
        if segments is None:
            scattered.append(task)
        else:
            straight.append((task, segments))
    unequal = list[_Task]()
    try:
        written = [*read_close(readers.bytes[1], [segments for _, segments in straight])]
    except CkptoolError:
        scattered, straight, written = [*tasks], [], []
    for (task, _), data in zip(straight, written, strict=True):
        if checksum(data) == task.run.checksum:
            yield PairTile(2 * task.nbytes)
        else:
            unequal.append(task)
    for task in scattered:
        yield from _prove_elements(task, readers)
    for task in unequal:
        yield from _difference(task, readers)


def _segments_of(task: _Task) -> list[Segment] | None:
    """Return the segments of the output that a run is in, in order; None if it is in no such."""
    if task.written is None:
        return None
    size, shape, box = task.pair.one.dtype.itemsize, task.pair.one.shape, task.run.box
    skip = 0 if box.shape == shape else skips_in(shape, size)(box)
    if skip is None:
        return None
    return list(cut_out(task.written, skip + task.run.start * size, task.nbytes))


def _prove_elements(task: _Task, readers: SideReaders) -> Iterator[PairTile]:
    """Prove a run that the output has in pieces."""
    from ckptool.engine.read.gather import array, raw

    pair, dtype, done = task.pair, task.pair.one.dtype, 0
    values = array((task.nbytes // dtype.itemsize,), dtype, readers.bytes[1].memory(task.nbytes))
    for box in task.run.boxes:
        part = values[done : done + box.volume].reshape(box.shape)
        done += box.volume
        try:
            readers.elements[1].gather_into(part, pair.other, box)
        except CkptoolError as error:
            yield PairTile(2 * task.nbytes, pair, box, failure=Failure(1, error))
            return
    if checksum(raw(values)) == task.run.checksum:
        yield PairTile(2 * task.nbytes)
    else:
        yield from _difference(task, readers)


def _difference(task: _Task, readers: SideReaders) -> Iterator[PairTile]:
    """Read both sides of a run that differs; Changed if the source has now what is written."""
    pair, is_found = task.pair, False
    size = pair.one.dtype.itemsize
    boxes = [tile for box in task.run.boxes for tile in tiles(box, size, PAIR_TILE)]
    for tile in read_both(pair, boxes, readers):
        yield tile
        is_found |= tile.values is None or not same_bits(*tile.values)
    if not is_found:
        yield PairTile(0, pair, task.run.box, failure=Failure(0, changed([task.run.file])))
