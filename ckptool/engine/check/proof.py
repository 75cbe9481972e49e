"""Prove that written tensors are what was read for them, without reading the source again.

While they were written, the checksum of each run of bytes was taken as it came from the source. Now
each such run is read from the output, from wherever that has the same elements of the same tensor,
and its checksum is compared. So whatever a transfer does between the two is proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import add
from typing import NamedTuple

from msgspec import Struct
from xxhash import xxh3_64_intdigest as xxh3

from ckptool.core.box import Box, flat_range, hull
from ckptool.core.casts import is_computed
from ckptool.core.catalog import Container, TensorEntry
from ckptool.core.chunks import Chunks, PlainChunks, chunks_of
from ckptool.core.layout import tiles
from ckptool.core.sharding.index import ChunkIndex
from ckptool.core.sharding.overlaps import overlapping_pair
from ckptool.engine.check.pairs import (
    Failure,
    PairJob,
    PairTile,
    SideReaders,
    TensorPair,
    read_both,
    same_bits,
)
from ckptool.engine.check.run_pairs import run_jobs
from ckptool.engine.read.byte_reader import join
from ckptool.engine.read.containers import Need
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.segments import (
    Segment,
    cut_out,
    entry_needs,
    is_run,
    runs_of_chunks,
    segments_of_tensor,
    skips_in,
)
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tiles import LARGE, PAIR_TILE, Job, RunsOf, known_runs
from ckptool.errors import CkptoolError
from ckptool.storage.file_status import changed
from ckptool.storage.files import Files, ReadSpan

_MOST = 512
"""Runs that are read at once."""
_BAND = 8 << 20
"""Bytes of rows that are read at once to cut columns out of them."""


class _Run(Struct, frozen=True):
    """Elements ``start`` to ``stop`` of a chunk's ``box``, in its order, with their checksum.

    They were read at an ``offset`` of a ``file`` of the source; without a file they were cast or
    computed, and have the checksum of what they became.
    """

    file: str
    offset: int
    box: Box
    start: int
    stop: int
    checksum: int

    @property
    def boxes(self) -> list[Box]:
        """The elements as boxes of the tensor, in order."""
        if self.stop - self.start == self.box.volume:
            return [self.box]
        local = flat_range(self.box.shape, self.start, self.stop)
        return [Box(*(tuple(map(add, self.box.lo, side)) for side in box)) for box in local]


class _Task(NamedTuple):
    """Runs that are proved by one read of the output: of ``extents``, or of ``boxes``.

    Only the runs of one box share a task; a run that has extents needs no boxes.
    """

    pair: TensorPair
    runs: tuple[_Run, ...]
    boxes: Sequence[Box]
    extents: Sequence[ReadSpan] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the runs."""
        return sum(_nbytes(self.pair, run) for run in self.runs)


def proof_jobs(
    pairs: Iterable[TensorPair], sums: ReadSums, sides: tuple[Files, Files], ranges: RangeCheck
) -> Iterator[PairJob]:
    """Yield the jobs that prove pairs of read and written tensors by the sums of what was read.

    A tensor that was not read as runs of what is written is compared instead: its source is read
    again. ``ranges`` counts numbers that were beyond the range of a cast.
    """
    compared, tasks, nbytes, read = list[TensorPair](), list[_Task](), 0, 0
    for pair in pairs:
        runs = _runs_read(pair, sums) if pair.is_plain else _runs_made(pair, sums, ranges)
        if runs is None:
            compared.append(pair)
            continue
        for task in _tasks_of(pair, runs, by_request=sides[1].policy.by_request):
            tasks.append(task)
            nbytes += task.nbytes
            read += max(1, len(task.extents))
            if nbytes >= PAIR_TILE or read >= _MOST:
                yield _job(tasks, nbytes)
                tasks, nbytes, read = [], 0, 0
    if tasks:
        yield _job(tasks, nbytes)
    yield from run_jobs(compared, sides)


def reread_bytes(entries: Iterable[TensorEntry]) -> int:
    """Return the bytes of tensors that are compared, as far as it is known before they are read."""
    return sum(
        entry.nbytes
        for entry in entries
        if entry.source_dtype == entry.dtype
        and not (is_computed(entry) or _is_stored_in_runs(entry))
    )


def _is_stored_in_runs(entry: TensorEntry) -> bool:
    """Return whether each chunk is one run of bytes, or is opened later."""
    chunks, size = chunks_of(entry), entry.source_dtype.itemsize
    return chunks.plain or all(
        isinstance(chunk.at, Container) or is_run(chunk.at, chunk.box.shape, size)
        for chunk in chunks.opened
    )


def _job(tasks: Sequence[_Task], nbytes: int) -> PairJob:
    written: RunsOf = partial(_needs, tasks)
    return Job(None, partial(_prove, tasks), [known_runs(), written], nbytes // len(tasks))


def _needs(tasks: Iterable[_Task], block: int) -> Iterator[Need]:
    """Yield the reads of the output for the runs of tasks."""
    for task in tasks:
        yield from entry_needs(task.pair.other, task.boxes, block)


def _tasks_of(pair: TensorPair, runs: Iterable[_Run], *, by_request: bool) -> Iterator[_Task]:
    """Yield the tasks of a pair: for each run that the output has as runs, else for bands.

    Each read of a store is announced by itself, as elements.
    """
    written = None if by_request else segments_of_tensor(pair.other)
    scattered = list[_Run]()
    for run in runs:
        extents = None if written is None else _extents_of(pair, run, written)
        if extents is None:
            scattered.append(run)
        else:
            yield _Task(pair, (run,), (), extents)
    yield from _bands(pair, scattered)


def _extents_of(pair: TensorPair, run: _Run, written: Sequence[Segment]) -> list[ReadSpan] | None:
    """Return the extents of the output that hold a run, in order; None if none do."""
    size, shape, box = pair.one.dtype.itemsize, pair.one.shape, run.box
    skip = 0 if box.shape == shape else skips_in(shape, size)(box)
    if skip is None:
        return None
    segments = cut_out(written, skip + run.start * size, _nbytes(pair, run))
    return [segment[:3] for segment in segments]


def _bands(pair: TensorPair, runs: Iterable[_Run]) -> Iterator[_Task]:
    """Yield the tasks of scattered runs, one for all runs of the same rows.

    Runs are scattered if source and output cut rows at different columns. All runs of a small
    tensor are one task.
    """
    placed = sorted(((run.boxes, run) for run in runs), key=lambda item: item[0][0].lo)
    is_small = pair.one.nbytes < LARGE
    rows, band, nbytes = None, list[_Run](), 0
    for boxes, run in placed:
        key = () if is_small else _rows_of(boxes)
        if rows != key or nbytes >= _BAND:
            yield from _tasks_of_band(pair, band)
            rows, band, nbytes = key, [], 0
        band.append(run)
        nbytes += _nbytes(pair, run)
    yield from _tasks_of_band(pair, band)


def _rows_of(boxes: Sequence[Box]) -> object:
    """Return the key shared by runs of the same rows; a run of several boxes has its own."""
    (low, *_), (high, *_) = boxes[0].lo or (0,), boxes[0].hi or (1,)
    return (low, high) if len(boxes) == 1 else boxes


def _tasks_of_band(pair: TensorPair, runs: Sequence[_Run]) -> Iterator[_Task]:
    """Yield one task for runs that fill the box around them, else one for each."""
    boxes = [box for run in runs for box in run.boxes]
    if len(runs) > 1 and (around := hull(boxes)).volume == sum(box.volume for box in boxes):
        yield _Task(pair, tuple(runs), [around])
    else:
        yield from (_Task(pair, (run,), run.boxes) for run in runs)


def _runs_read(pair: TensorPair, sums: ReadSums) -> list[_Run] | None:
    """Return the runs that were read of a tensor; None unless they are all that is written."""
    chunks, size = _chunks_of(pair), pair.one.dtype.itemsize
    chunk_runs = runs_of_chunks(chunks, size)
    if chunk_runs is None:
        return None
    runs, covered = list[_Run](), 0
    for box, (file, begin, length, _) in zip(chunks.boxes, chunk_runs, strict=True):
        reached = begin
        for offset, nbytes, read in sums.runs(file, begin, begin + length):
            if offset + nbytes <= reached:  # read again, as for another file
                continue
            start, rest = divmod(offset - begin, size)
            if rest or nbytes % size:
                return None
            covered += offset + nbytes - max(reached, offset)
            reached = offset + nbytes
            runs.append(_Run(file, offset, box, start, start + nbytes // size, read))
    is_all = covered == pair.elements * size and (not pair.boxes or _are_written(pair, runs))
    return runs if is_all else None


def _runs_made(pair: TensorPair, sums: ReadSums, ranges: RangeCheck) -> list[_Run] | None:
    """Return what a tensor was cast or computed to; None unless it is all that is written."""
    results = [result for result in sums.made(pair.one.name, pair.one.ndim) if result.box.volume]
    boxes = [result.box for result in results]
    if sum(box.volume for box in boxes) != pair.elements or overlapping_pair(boxes) is not None:
        return None
    runs = [_Run("", 0, box, 0, box.volume, read) for box, read, _ in results]
    if pair.other.source_dtype != pair.one.dtype or not _are_written(pair, runs):
        return None
    for result in results:
        ranges.add(pair.one.name, pair.one.dtype, result.losses)
    return runs


def _chunks_of(pair: TensorPair) -> Chunks:
    """Return the chunks of the tensor that was read that hold elements to be written."""
    if not pair.boxes:
        return chunks_of(pair.one)
    index = ChunkIndex(pair.one)
    chunks = (overlap.chunk for box in pair.boxes for overlap in index.find(box))
    return PlainChunks({id(chunk): chunk for chunk in chunks}.values())


def _are_written(pair: TensorPair, runs: Iterable[_Run]) -> bool:
    """Return whether the chunks of the written tensor contain all elements of some runs."""
    index = ChunkIndex(pair.other)
    return all(
        sum(overlap.box.volume for overlap in index.find(box)) == box.volume
        for run in runs
        for box in run.boxes
    )


def _prove(tasks: Sequence[_Task], readers: SideReaders) -> Iterator[PairTile]:
    """Prove tasks: first those of runs of bytes, which are read together, then the rest."""
    straight = [task for task in tasks if task.extents]
    elements = [task for task in tasks if not task.extents]
    try:
        unequal = [*_unequal_runs(straight, readers)]
    except CkptoolError:  # one by one, to find which of them cannot be read
        straight, unequal, elements = [], [], [*tasks]
    # twice the bytes, as of a comparison: progress counts those of both sides
    nbytes = sum([task.nbytes for task in straight])
    yield PairTile(2 * (nbytes - sum([_nbytes(pair, run) for pair, run in unequal])))
    for task in elements:
        try:
            wrong = _unequal(task, readers)
        except CkptoolError as error:
            box = task.runs[0].boxes[0]
            yield PairTile(2 * task.nbytes, task.pair, box, failure=Failure(1, error))
            continue
        unequal += [(task.pair, run) for run in wrong]
        yield PairTile(2 * (task.nbytes - sum(_nbytes(task.pair, run) for run in wrong)))
    for pair, run in unequal:
        yield from _difference(pair, run, readers)


def _unequal_runs(
    tasks: Sequence[_Task], readers: SideReaders
) -> Iterator[tuple[TensorPair, _Run]]:
    """Yield the runs that the output has otherwise; those close in a file are read together."""
    read = iter(readers.other.read_close(extent for task in tasks for extent in task.extents))
    for pair, (run,), _, extents in tasks:
        if xxh3(join([*islice(read, len(extents))])) != run.checksum:
            yield pair, run


def _unequal(task: _Task, readers: SideReaders) -> list[_Run]:
    """Return the runs of a task that the output, read as elements, has otherwise."""
    from ckptool.engine.read.gather import array, raw
    from ckptool.engine.read.numbers import part_of

    pair, dtype, done = task.pair, task.pair.one.dtype, 0
    boxes = task.boxes or task.runs[0].boxes
    elements = sum(box.volume for box in boxes)
    memory = readers.other.memory(elements * dtype.itemsize)
    values = array((elements,), dtype, memory)
    for box in boxes:
        part = values[done : done + box.volume].reshape(box.shape)
        readers.other.elements.gather_into(part, pair.other, box)
        done += box.volume
    if len(task.runs) == 1:
        return [run for run in task.runs if xxh3(raw(values)) != run.checksum]
    (around,) = boxes
    band, unequal = values.reshape(around.shape), list[_Run]()
    for run in task.runs:
        parts = [part_of(band, box.relative_to(around.lo)).tobytes() for box in run.boxes]
        if xxh3(b"".join(parts)) != run.checksum:
            unequal.append(run)
    return unequal


def _nbytes(pair: TensorPair, run: _Run) -> int:
    return (run.stop - run.start) * pair.one.dtype.itemsize


def _difference(pair: TensorPair, run: _Run, readers: SideReaders) -> Iterator[PairTile]:
    """Read both sides of a run that differs; if they are equal now, name the one that changed.

    The tile then has the error Changed, of the source or of the output.
    """
    size, is_found = pair.one.dtype.itemsize, False
    boxes = [tile for box in run.boxes for tile in tiles(box, size, PAIR_TILE)]
    for tile in read_both(pair, boxes, readers):
        yield tile
        is_found |= tile.values is None or not same_bits(*tile.values)
    if is_found:
        return
    side = 1 if _read_again(pair, run, readers) == run.checksum else 0
    file = (pair.one, pair.other)[side].chunks[0].at.file if side or not run.file else run.file
    yield PairTile(0, pair, run.box, failure=Failure(side, changed([file])))


def _read_again(pair: TensorPair, run: _Run, readers: SideReaders) -> int:
    """Return the checksum that a run of the source has now."""
    if run.file:
        return xxh3(readers.one.read(run.file, run.offset, _nbytes(pair, run)))
    from ckptool.engine.read.gather import bits_of

    return xxh3(bits_of(readers.one.elements.read_values(pair.one, run.box)))
