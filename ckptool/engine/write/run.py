"""Plan -> bytes: gather, cast, checksum, write; on several threads, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, zip_longest
from operator import attrgetter
from pathlib import Path

from ckptool.core.casts import is_in_order
from ckptool.core.catalog import Computed, TensorEntry
from ckptool.core.layout import FileLayout, Literal, Part, Verbatim
from ckptool.core.planning.groups import Tile, are_small
from ckptool.core.planning.plan import Plan
from ckptool.engine.checksum import CrcPiece, crc32, join_crcs, require_intact
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.planned import PlannedPiece, PlanReader, plan_job
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tiles import PAIR_TILE, read_tiles
from ckptool.engine.write.journal import Journal, find_finished
from ckptool.engine.write.output import (
    WRITE,
    OutputFiles,
    SmallRun,
    UnfinishedFile,
    apply_patches,
    small_runs,
)
from ckptool.engine.write.work import RunOptions, Work
from ckptool.errors import Damaged, Unsupported
from ckptool.storage.disk import allocate, open_unfollowed
from ckptool.storage.files import SPAN, TILE, Files
from ckptool.storage.local import LocalSource

_MINIMUM_PER_WORKER = 16 << 20
"""Bytes of memory for a worker: those of a comparison, a tile and a span of either side, fit."""
_TILE_OF = attrgetter("tile")
_MOST_CHUNKS = 512
"""Chunks of small tensors that are read by one job, which may read the gaps between them, too."""
_NEAR = 8 << 20
"""Bytes between the small tensors that one job reads of a file in a store: what is fetched with
those that are further on is kept until the rest of the file is read.
"""


def run(work: Work, folder: Path, journal: Journal | None = None) -> None:
    """Write files of a plan below ``folder``.

    Each finished file is noted in a ``journal``, and files noted there are not written again.
    Raises Damaged if source bytes do not match the checksum that their writer stored or a file ends
    early, TransferError if writing fails, Unsupported if the budget is too small.
    """
    work.source.keep(fetched_ahead(work.source, work.options))
    finished = [] if journal is None else find_finished(work, folder, journal)
    todo = [number for number in work.numbers if number not in finished]
    work.progress.add(sum(work.plan.layout.files[number].nbytes for number in finished))
    work.require_records(finished)
    _PlanWriter(work, folder, journal).write(todo)


def peak_memory(plan: Plan, source: Files, options: RunOptions, *, local: bool = True) -> int:
    """Return the most bytes of memory that a run uses for tiles, spans and decoded blobs.

    Reading the output back takes a tile and a span of either side. Uploads to a store, where the
    target is not ``local``, use all of the budget.
    """
    if not local:
        return options.budget
    per_worker = 2 * (PAIR_TILE + SPAN) + plan.largest_blob
    workers = workers_within_budget(plan, options, source)
    return workers * per_worker + fetched_ahead(source, options)


def fetched_ahead(source: Files, options: RunOptions) -> int:
    """Return the bytes of the budget for data fetched ahead: none for a disk."""
    return options.budget // 4 if source.policy.by_request else 0


def workers_within_budget(plan: Plan, options: RunOptions, *sources: Files) -> int:
    """Return how many workers, which read all sources, the budget has room for.

    Raises Unsupported if not even one fits.
    """
    per_worker = _MINIMUM_PER_WORKER + plan.largest_blob
    if per_worker > options.budget:
        raise Unsupported(
            f"a budget of {options.budget:,} bytes is too small: one worker needs {per_worker:,}",
            hint=f"--budget {-(-per_worker // (1 << 20))}MiB",
        )
    left = options.budget - sum(fetched_ahead(source, options) for source in sources)
    workers = options.workers or max(source.policy.workers for source in sources)
    return max(1, min(workers, left // per_worker))


class _PlanWriter:
    """One run of a plan: the files that are still to be written, and the state of each.

    Its threads read tiles of ``sides``, the source, and write them.
    """

    def __init__(self, work: Work, folder: Path, journal: Journal | None) -> None:
        self._work = work
        self._plan = work.plan
        self._files = work.plan.layout.files
        self._source = work.source
        self._folder = folder
        self._journal = journal
        self._output = OutputFiles(folder, synced=work.options.fsync)
        self._progress = work.progress
        self._lock = threading.Lock()
        self._unfinished: dict[int, UnfinishedFile] = {}

    @property
    def sides(self) -> tuple[Files]:
        """The files that are read."""
        return (self._source,)

    def reader(self) -> PlanReader:
        """Return the reader for one thread."""
        return _WritingReader(self._work, self._output)

    def write(self, todo: Sequence[int]) -> None:
        """Write the files ``todo``."""
        workers = workers_within_budget(self._plan, self._work.options, self._source)
        jobs = map(plan_job, self._write_jobs(todo))
        read_tiles(self, jobs, self._write_tiles, workers, self._progress)
        self._work.records.read_unseen(self._source, workers)
        require_intact(self._work.records.problems())
        try:  # those without tensors, which no tile finishes
            for number in [number for number, file in self._unfinished.items() if not file.left]:
                self._finish(number)
        finally:
            self._output.close()

    def _write_jobs(self, todo: Sequence[int]) -> Iterator[list[Tile]]:
        """Yield the jobs of all files, one batch of files after the other; make these files."""
        for batch in self._plan.batches(todo):
            for number in batch:
                self._create(self._files[number])
            yield from self._jobs({number: self._files[number].parts for number in batch})

    def _jobs(self, files: Mapping[int, tuple[Part, ...]]) -> Iterator[list[Tile]]:
        """Yield the jobs of some files with their parts."""
        tile, in_store = self._source.policy.tile, self._source.policy.by_request
        for number, parts in files.items():
            self._unfinished[number] = UnfinishedFile(parts)
        small, nbytes, chunks = list[Tile](), 0, 0
        for group in self._plan.groups(files, tile):
            jobs, entry = self._plan.jobs(group, tile), self._plan.entry_of(group)
            if group.at_once:
                if small and in_store and not _are_near(small[0].entry, entry):
                    yield small
                    small, nbytes, chunks = [], 0, 0
                small += chain.from_iterable(jobs)
                nbytes, chunks = nbytes + entry.nbytes, chunks + len(entry.chunks)
                if nbytes >= TILE or chunks >= _MOST_CHUNKS:
                    yield small
                    small, nbytes, chunks = [], 0, 0
            elif group.band is None and is_in_order(entry):  # one thread decodes on and on
                yield list(chain.from_iterable(jobs))
            else:
                yield from jobs
        if small:
            yield small

    def _create(self, file: FileLayout) -> None:
        path = self._folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        # not written over: by a hard link it may be another folder's file, too
        path.unlink(missing_ok=True)
        descriptor = open_unfollowed(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "wb") as stream:
            allocate(stream.fileno(), file.nbytes)

    def _write_tiles(self, tiles: Sequence[Tile], read: Iterator[PlannedPiece]) -> None:
        """Write the pieces of some tiles as they are read; of small ones those that adjoin."""
        if are_small(tiles):
            for run in small_runs(read, self._unfinished):
                self._write_small(run)
            return
        done = []
        for tile, pieces in groupby(read, _TILE_OF):
            crc = join_crcs([self._write_piece(tile, piece) for piece in pieces])
            done.append((tile, (tile.offset, tile.nbytes, crc)))
        with self._lock:
            for tile, written in done:
                self._unfinished[tile.file].tiles.setdefault(tile.part, []).append(written)
        # only now: the last bytes that are counted finish a file, which needs all its checksums
        for tile, _ in done:
            self._count(tile.file, tile.nbytes)

    def _write_piece(self, tile: Tile, piece: PlannedPiece) -> CrcPiece:
        self._output.write(self._files[tile.file].path, tile.offset + piece.skip, piece.data)
        return piece.skip, piece.nbytes, piece.crc

    def _write_small(self, run: SmallRun) -> None:
        self._output.write(self._files[run.file].path, run.start, memoryview(run.data))
        with self._lock:
            self._unfinished[run.file].crcs.update(run.crcs)
        self._progress.add(run.literals)
        self._count(run.file, len(run.data) - run.literals)

    def _count(self, number: int, nbytes: int) -> None:
        """Note that more bytes of a file's tensors are written; the last of them finish it."""
        file = self._unfinished[number]
        with self._lock:
            file.left -= nbytes
            last = not file.left
        if last:  # without the lock: other threads write on while the disk syncs
            self._finish(number)

    def _finish(self, number: int) -> None:
        """Write the non-tensor data that is left, sync the file, and note that it is done."""
        path, file = self._files[number].path, self._unfinished.pop(number)
        start, literals = 0, bytearray()
        for at, offset, part in file.unwritten():
            adjoins = isinstance(part, Literal) and start + len(literals) == offset
            if not adjoins or len(literals) >= WRITE:
                self._write_literals(path, start, literals)
                start, literals = offset, bytearray()
            if isinstance(part, Literal):
                data = apply_patches(part, at, file.part_crc)
                literals += data
                file.crcs[at] = crc32(data)
            else:
                file.crcs[at] = self._copy_file(part, path, offset)
        self._write_literals(path, start, literals)
        if self._work.options.fsync:
            self._output.sync(path)
        if self._journal is not None:
            self._journal.done(path, file.crc)

    def _write_literals(self, path: str, start: int, literals: bytearray) -> None:
        """Write adjoining literals, which begin at an offset of a file."""
        self._output.write(path, start, memoryview(literals))
        self._progress.add(len(literals))

    def _copy_file(self, part: Verbatim, path: str, offset: int) -> int:
        """Copy a file unchanged to an offset of another; return its CRC-32."""
        crc = 0
        for piece in read_verbatim(part, self._source, self._work.sums):
            self._output.write(path, offset, piece)
            offset += len(piece)
            crc = crc32(piece, crc)
        self._progress.add(part.nbytes)
        return crc


class _WritingReader(PlanReader):
    """Reads on one thread, which closes what it wrote when it ends.

    No other thread may: after a second interrupt this one still writes, and its descriptors'
    numbers would be given to other files.
    """

    def __init__(self, work: Work, output: OutputFiles) -> None:
        super().__init__(work.source, work.records, work.sums)
        self._output = output

    def close(self) -> None:
        """Close the files that this thread reads and writes."""
        try:
            self._output.close()
        finally:
            super().close()


def read_verbatim(
    part: Verbatim, source: Files, sums: ReadSums | None = None
) -> Iterator[memoryview]:
    """Yield the pieces of a file that is copied unchanged, and note the checksum of each.

    Damaged if its size has changed.
    """
    files = source if part.file in source.files else LocalSource.file(Path(part.file))
    name = part.file if files is source else Path(part.file).name
    reader = ByteReader(files)
    try:
        if files.files[name] != part.nbytes:
            raise Damaged(f"{part.file}: its size changed while it was copied")
        offset = 0
        for piece in reader.run(name, 0, part.nbytes):
            if sums is not None:
                sums.note(part.file, offset, piece)
            offset += len(piece)
            yield piece
    finally:
        reader.close()


def _are_near(one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether the first bytes of two tensors, or of what they are computed of, are near."""
    return all(
        first and second and first[0] == second[0] and abs(first[1] - second[1]) < _NEAR
        for first, second in zip_longest(_first_bytes(one), _first_bytes(other))
    )


def _first_bytes(entry: TensorEntry) -> Iterator[tuple[str, int]]:
    """Yield where the first chunk of a tensor is, or of each that it is computed of."""
    at = entry.chunks[0].at
    if not isinstance(at, Computed):
        yield at.file, at.offset
        return
    for stored in at.stored:
        yield from _first_bytes(stored)
