"""Read the wanted parts of a source, tile by tile on a few threads: the one loop for all readers.

A job is what one thread reads in order: a whole tensor if the order matters (its SHA-256), some
tiles of one if it does not, a record, a file. The sink is called once per job, with the job's
subject and its tiles; each tile is read when the sink requests it and valid until it requests the
next. So a sink keeps its state of a job in locals, and may stop early or catch what a read raises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from heapq import heappop, heappush
from itertools import islice
from time import perf_counter, thread_time
from typing import Generic, NamedTuple, Protocol, TypeVar

from ckptool.core.catalog import Catalog, Opening
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.containers import Need, runs_of
from ckptool.storage.file_status import changed
from ckptool.storage.files import Files, ReadSpan

PAIR_TILE = 3 << 20
"""Bytes of a compared tile: with smaller ones two threads wait for the GIL when reading."""
_MOST_JOBS = 1 << 12
_MOST_RUNS = 1 << 14
"""Jobs, and runs of at most a few MiB each, whose reads from a store are planned together."""
LARGE = 3 << 17
"""Bytes that a job moves at a time which make it the kernel's work: processors share it."""
SMALL = LARGE - 1
"""The same of a job of many small tensors, whatever they have together: it is Python's work."""
_ENOUGH = 1 << 20
"""Bytes of the small jobs that a thread takes at a time, each of ``_LEAST`` bytes at least."""
_LEAST = 1 << 12
_MOSTLY = 2
"""A turn mostly waits if it takes so many times the processor's time that it uses."""
_AT_ONCE = 64
"""Batches that threads do side by side before one of them takes, and measures, a turn again."""
_LITTLE = 16 << 20
"""Bytes of memory that do not justify reordering jobs."""


class Closeable(Protocol):
    """Resources of a thread, released at its end."""

    def close(self) -> None:
        """Release everything."""


class ReadTile(Protocol):
    """Elements of a tensor (a C-ordered array), or bytes (a memoryview), or both of a pair."""

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""


Subject = TypeVar("Subject")
Reader = TypeVar("Reader", bound=Closeable)
ReaderOut = TypeVar("ReaderOut", bound=Closeable, covariant=True)
TileOut = TypeVar("TileOut", bound=ReadTile)


class ReadSource(Protocol[ReaderOut]):
    """What tiles are read from: files, one side or two of a comparison."""

    @property
    def sides(self) -> Sequence[Files]:
        """The files of each side."""

    def reader(self) -> ReaderOut:
        """Return the reader for one thread."""


RunsOf = Callable[[int], Iterable[Need]]
"""Yields what a job reads, if a read costs at least a block of so many bytes."""


class Job(NamedTuple, Generic[Subject, Reader, TileOut]):
    """The tiles that one thread reads in order; ``subject`` identifies them to the sink.

    ``runs`` yield, for each side, the bytes that it reads there; they are empty if that is not
    known before. Jobs of few ``nbytes`` are taken several at a time.
    """

    subject: Subject
    read: Callable[[Reader], Iterator[TileOut]]
    runs: Sequence[RunsOf] = ()
    nbytes: int = LARGE


def known_runs(*runs: ReadSpan) -> RunsOf:
    """Return a callable that yields the bytes of a job, whatever a read costs."""
    return lambda block: runs


class Cancelled(Exception):
    """Another thread's error ends this job, too."""


class _Turns:
    """Lets one thread after the other do small jobs: Python's work more than the kernel's.

    Two threads that do such at once hand the GIL to and fro, and take twice as long as one of them
    alone: 2,600 tensors of 8 KiB are resharded in 1.0 s, not 1.9. If the one whose turn it is
    mostly waits for a disk or a network, all threads do the next jobs at once.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._at_once = 0

    @contextmanager
    def take(self, jobs: int) -> Iterator[None]:
        """Hold the turn while so many small jobs are done; no jobs need no turn."""
        if not jobs or not self._begin():
            yield
            return
        begun, busy = perf_counter(), thread_time()
        try:
            yield
        finally:
            is_waiting = perf_counter() - begun > _MOSTLY * (thread_time() - busy)
            self._at_once = _AT_ONCE if is_waiting else 0
            self._turn.release()

    def _begin(self) -> bool:
        """Wait for the turn, and return whether this thread has it: not if all work at once."""
        self._turn.acquire()
        if not self._at_once:
            return True
        self._at_once -= 1
        self._turn.release()
        return False


def read_tiles(
    source: ReadSource[Reader],
    jobs: Iterable[Job[Subject, Reader, TileOut]],
    sink: Callable[[Subject, Iterator[TileOut]], None],
    workers: int,
    progress: Progress = UNWATCHED,
) -> None:
    """Read all jobs into the sink, on ``workers`` threads.

    The sink is called by several threads at once, in any order of jobs. ``progress`` counts the
    bytes of each tile once the sink is done with it. The first error, or an interruption, ends
    all threads after their tile, and is raised.
    """
    stop, lock, turns = threading.Event(), threading.Lock(), _Turns()
    plans: deque[Callable[[], None]] = deque()
    queue, sides, large = iter(jobs), source.sides, LARGE
    if any(files.policy.by_request for files in sides):
        # one job at a time, as their reads are announced; they wait for answers, not for the GIL
        queue, large = _announce(sides, queue, workers, plans), 0

    def count_bytes(tiles: Iterator[TileOut]) -> Iterator[TileOut]:
        for tile in tiles:
            yield tile
            progress.add(tile.nbytes)
            if stop.is_set():
                raise Cancelled

    def do(batch: list[Job[Subject, Reader, TileOut]], reader: Reader) -> None:
        for job in batch:
            sink(job.subject, count_bytes(job.read(reader)))

    def read_jobs() -> None:
        with closing(source.reader()) as reader:
            while not stop.is_set():
                with lock:
                    small, last = _next_jobs(queue, large)
                if not small and not last:
                    return
                with turns.take(len(small)):
                    do(small, reader)
                do(last, reader)

    try:
        _run_threads(read_jobs, workers, stop)
    finally:
        for end in plans:
            end()


def _next_jobs(
    jobs: Iterator[Job[Subject, Reader, TileOut]], large: int
) -> tuple[list[Job[Subject, Reader, TileOut]], list[Job[Subject, Reader, TileOut]]]:
    """Take the next small jobs, and the one of ``large`` bytes and more that follows, if any."""
    small, nbytes = list[Job[Subject, Reader, TileOut]](), 0
    for job in jobs:
        if job.nbytes >= large:
            return small, [job]
        small.append(job)
        nbytes += max(_LEAST, job.nbytes)
        if nbytes >= _ENOUGH:
            break
    return small, []


def _announce(
    sides: Sequence[Files],
    jobs: Iterator[Job[Subject, Reader, TileOut]],
    workers: int,
    plans: deque[Callable[[], None]],
) -> Iterator[Job[Subject, Reader, TileOut]]:
    """Yield all jobs, in the order of a few that needs the least memory; announce their reads.

    Reads are announced to stores in groups. ``plans`` end the last announcements.
    """
    opened: set[Opening] = set()
    while window := list(_window(sides, jobs, opened)):
        runs = [[job_runs[side] for _, job_runs in window] for side in range(len(sides))]
        order = _best_order(runs, workers)
        while len(plans) > len(sides):  # threads may still read what was announced last
            plans.popleft()()
        for files, side_runs in zip(sides, runs, strict=True):
            planned = _side_by_side([side_runs[at] for at in order], workers)
            plans.append(files.plan_reads(planned))
        yield from (window[at][0] for at in order)


def _window(
    sides: Sequence[Files], jobs: Iterator[Job[Subject, Reader, TileOut]], opened: set[Opening]
) -> Iterator[tuple[Job[Subject, Reader, TileOut], list[list[ReadSpan]]]]:
    """Yield the next jobs, with what each reads from each side, until they are many runs.

    The first job that reads something to be ``opened`` opens it.
    """
    count = 0
    for job in islice(jobs, _MOST_JOBS):
        queries = job.runs or [known_runs() for _ in sides]
        needs = (query(files.policy.block) for query, files in zip(queries, sides, strict=True))
        runs = [list(runs_of(side_needs, opened)) for side_needs in needs]
        yield job, runs
        count += sum(map(len, runs))
        if count >= _MOST_RUNS:
            return


def _best_order(runs: Sequence[Sequence[Sequence[ReadSpan]]], workers: int) -> Sequence[int]:
    """Return the order of jobs, by what each reads from each side, that needs the least memory.

    Orders to choose from: as jobs come, by files, by places in files that are written side by side.
    """
    from ckptool.storage.planned_ranges import memory_to_read, unversioned

    places = range(len(runs[0]))
    firsts = [min((run for side in runs for run in side[at]), default=("", 0, 0)) for at in places]
    by_file = sorted(places, key=lambda at: firsts[at])
    by_offset = sorted(places, key=lambda at: firsts[at][1])

    def memory(order: Sequence[int]) -> int:
        ordered = (_side_by_side([side_runs[at] for at in order], workers) for side_runs in runs)
        return sum(memory_to_read(unversioned(side)) for side in ordered)

    if memory(places) <= _LITTLE:
        return places
    return min(places, by_file, by_offset, key=memory)


def _side_by_side(jobs: Sequence[Sequence[ReadSpan]], workers: int) -> Iterator[ReadSpan]:
    """Yield the runs of all jobs in the order in which equally fast threads read them.

    Each thread continues where the fewest bytes were read: jobs that share rows keep in step,
    however many small runs one of them has more than another.
    """
    waiting = enumerate(map(iter, jobs))
    reading = [(0, at, runs) for at, runs in islice(waiting, workers)]
    while reading:
        done, at, runs = heappop(reading)
        if (run := next(runs, None)) is not None:
            yield run
            heappush(reading, (done + run[2], at, runs))
        elif (job := next(waiting, None)) is not None:
            heappush(reading, (done, *job))


def _run_threads(work: Callable[[], None], count: int, stop: threading.Event) -> None:
    """Do ``work`` on ``count`` threads until all have ended.

    The first error, or an interruption of the caller, sets ``stop`` and is raised at the end.
    """
    errors: list[BaseException] = []

    def run(ended: threading.Event) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised by the calling thread)
            errors.append(error)
            stop.set()
        finally:
            ended.set()

    ends = [threading.Event() for _ in range(count)]
    # daemons: a second interrupt ends the process, even if a disk hangs
    threads = [threading.Thread(target=run, args=(ended,), daemon=True) for ended in ends]
    try:
        for thread in threads:
            thread.start()
        for ended in ends:
            ended.wait()
    except BaseException as error:  # noqa: BLE001 (raised once all threads have ended)
        errors.append(error)
        stop.set()
        # an interrupted Thread.join takes a running thread for ended
        for thread, ended in zip(threads, ends, strict=True):
            if thread.is_alive():
                ended.wait()
    if errors:
        raise errors[0]


def require_unchanged(catalog: Catalog, source: Files) -> None:
    """Raise Changed if a file of the catalog was written, replaced or removed since listed."""
    files = source.changed([*catalog.files, *catalog.companions])
    if files:
        raise changed(files).within(source.root)
