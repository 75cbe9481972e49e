"""Plan -> a store: each file is written from beginning to end, several files at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from msgspec import Struct

from ckptool.core.layout import Data, Literal, Verbatim
from ckptool.core.planning.groups import Group, LayoutPart, Tile
from ckptool.core.planning.plan import Plan
from ckptool.engine.checksum import crc32, require_intact
from ckptool.engine.read.containers import Need
from ckptool.engine.read.planned import PlanReader
from ckptool.engine.read.segments import tile_needs
from ckptool.engine.read.tiles import Job, read_tiles, require_unchanged
from ckptool.engine.write.output import apply_patches
from ckptool.engine.write.run import fetched_ahead, read_verbatim
from ckptool.engine.write.work import RunOptions, Work
from ckptool.errors import Unsupported
from ckptool.storage.clients.client import AT_ONCE
from ckptool.storage.files import SPAN, Files
from ckptool.storage.multipart import memory_of_part, upload
from ckptool.storage.url import RemotePath


class Capacity(NamedTuple):
    """What the memory budget has room for.

    ``files`` that are sent at once; for each of them reading threads, and parts in memory.
    """

    files: int
    readers: int
    parts: int


def send(work: Work, folder: RemotePath, finished: Collection[str]) -> None:
    """Write those files of a plan that are not ``finished`` yet.

    The layout's last file appears after all others, and once the source is found to be unchanged
    and its checksums match. Raises as ``run`` does.
    """
    source, options, files = work.source, work.options, work.plan.layout.files
    todo = [number for number in work.numbers if files[number].path not in finished]
    done = [number for number in work.numbers if number not in todo]
    capacity = within_budget(work.plan, source, options, todo)
    work.require_records(done)
    contents = _FileContents(work, capacity.readers)
    work.progress.add(sum(files[number].nbytes for number in done))
    last = [number for number in todo if number == len(files) - 1]

    def check() -> None:
        work.records.read_unseen(source, options.workers or source.policy.workers)
        require_intact(work.records.problems())
        if last:
            require_unchanged(work.plan.catalog, source)

    def write(number: int, pieces: Iterator[memoryview]) -> None:
        file, contents = files[number], _check_at_end(pieces, check) if number in last else pieces
        upload(folder / file.path, file.nbytes, contents, capacity.parts)

    jobs = [contents.job(number) for number in todo if number not in last]
    read_tiles(contents, jobs, write, capacity.files, work.progress)
    read_tiles(contents, map(contents.job, last), write, 1, work.progress)
    if not last:
        check()


def _check_at_end(pieces: Iterator[memoryview], check: Callable[[], None]) -> Iterator[memoryview]:
    """Yield all pieces of a file, and check before they end: until then it does not appear."""
    yield from pieces
    check()


def within_budget(
    plan: Plan, source: Files, options: RunOptions, numbers: Collection[int]
) -> Capacity:
    """Return the capacity for sending files of the layout, those of ``numbers``.

    Raises Unsupported if there is no room for one file, one reading thread and one part.
    """
    cached = fetched_ahead(source, options)
    part = memory_of_part(max((plan.layout.files[number].nbytes for number in numbers), default=0))
    reader = 2 * source.policy.tile + 2 * SPAN + plan.largest_blob
    least = part + reader
    if least > options.budget - cached:
        cached //= 2
    left = options.budget - cached
    if least > left:
        # the half that is fetched ahead is an eighth of the budget
        minimum = least * 8 // 7 if cached else least
        raise Unsupported(
            f"a budget of {options.budget:,} bytes is too small: an upload needs {minimum:,}",
            hint=f"--budget {-(-minimum // (1 << 20))}MiB",
        )
    source.keep(cached)
    reading, sending = options.workers or source.policy.workers, options.workers or AT_ONCE
    count = max(1, len(numbers))
    # as many files at once in each round, not few in the last one
    rounds = -(-count // max(1, min(count, sending, left // least)))
    files = -(-count // rounds)
    spare = left // files - least
    # half of the rest for more readers, what they leave for more parts
    readers = min(-(-reading // files) - 1, spare // 2 // reader)
    parts = min(-(-sending // files), (spare - readers * reader) // part)
    return Capacity(files, 1 + readers, 1 + parts)


class _FileContents(Struct, frozen=True):
    """The contents of a layout's files; their reader has ``readers`` threads of its own."""

    work: Work
    readers: int

    @property
    def sides(self) -> tuple[Files]:
        """The files that are read."""
        return (self.work.source,)

    def reader(self) -> _ContentReader:
        """Return the reader for one thread."""
        return _ContentReader(self.work, self.readers)

    def job(self, number: int) -> Job[int, _ContentReader, memoryview]:
        """Return the job that reads all bytes of one file of the layout."""
        runs = partial(_file_runs, self.work.plan, number, self.work.source)
        return Job(number, lambda reader: reader.file(number), [runs])


class _ContentReader:
    """Reads files from beginning to end, while its threads gather what comes next."""

    def __init__(self, work: Work, readers: int) -> None:
        self._plan, self._source, self._sums = work.plan, work.source, work.sums
        self._readers = readers
        self._pool = ThreadPoolExecutor(readers, "ckptool-read")
        self._idle: SimpleQueue[PlanReader] = SimpleQueue()
        for _ in range(readers):
            self._idle.put(PlanReader(work.source, work.records, work.sums))

    def close(self) -> None:
        """Close all files."""
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()

    def file(self, number: int) -> Iterator[memoryview]:
        """Yield all bytes of a file, piece by piece; a checksum comes after its part."""
        crcs: dict[int, int] = {}
        offset = 0
        for position, part in enumerate(self._plan.layout.files[number].parts):
            if isinstance(part, Literal):
                yield memoryview(apply_patches(part, position, crcs.__getitem__))
            elif isinstance(part, Verbatim):
                yield from read_verbatim(part, self._source, self._sums)
            else:
                total = 0
                for data in self._tiles(LayoutPart(number, position, offset, part)):
                    total = crc32(data, total)
                    yield memoryview(data)
                crcs[position] = total
            offset += part.nbytes

    def _tiles(self, spot: LayoutPart) -> Iterator[bytearray]:
        """Read a tensor part in order, while further tiles are read."""
        group = _group(self._plan, spot, self._source)
        waiting: deque[Future[bytearray]] = deque()
        for tiles in self._plan.jobs(group, self._source.policy.tile):
            waiting.append(self._pool.submit(self._gather, tiles[0]))
            if len(waiting) > self._readers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _gather(self, tile: Tile) -> bytearray:
        # one is idle: there is one for each thread of the pool
        data, reader = bytearray(tile.nbytes), self._idle.get()
        try:
            for piece in reader.pieces([tile]):
                data[piece.skip : piece.skip + piece.nbytes] = piece.data
            return data
        finally:
            self._idle.put(reader)


def _file_runs(plan: Plan, number: int, source: Files, block: int) -> Iterator[Need]:
    """Yield what is read for one file of the layout, in order."""
    for position, part in enumerate(plan.layout.files[number].parts):
        if isinstance(part, Data):
            group = _group(plan, LayoutPart(number, position, 0, part), source)
            for tiles in plan.jobs(group, source.policy.tile):
                yield from tile_needs(tiles, block)


def _group(plan: Plan, spot: LayoutPart, source: Files) -> Group:
    """Return a part as it is cut into tiles: by whole rows if files share those of a store."""
    shared = plan.cut_by_rows(spot, SPAN) if source.policy.by_request else None
    return shared or Group((spot,))
