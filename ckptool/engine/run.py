"""Plan -> bytes: gather, cast, checksum, write; on several threads, in bounded memory."""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptool.core.catalog import Extent, Record, contiguous
from ckptool.core.layout import FileLayout, Literal, Verbatim
from ckptool.core.plan import Plan, Source, Tile
from ckptool.engine.allocate import allocate
from ckptool.engine.checksum import RecordCheck, crc32, joined
from ckptool.engine.gather import GATHER_BYTES, Array, Gatherer, Noted, cast, raw, unit
from ckptool.engine.journal import NO_JOURNAL, Journal
from ckptool.engine.threads import Job, share_jobs
from ckptool.errors import CannotDo, Damaged, TransferError, damaged

_TILE = 1 << 20
_PIECE = 1 << 19
"""Bytes that are read, checked and written at a time, while the processor's cache holds them."""
_BATCH = 16
_MOST_OPEN = 2 * _BATCH
_MINIMUM_PER_WORKER = 16 << 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``budget`` in bytes of memory for tiles, source spans and decoded blobs together.

    Twice as many workers as cores: while some wait for the disk or each other, others move bytes.
    """

    workers: int = min(8, 2 * (os.cpu_count() or 1))
    budget: int = 1 << 30
    fsync: bool = True


def run(
    plan: Plan,
    root: str,
    folder: Path,
    options: RunOptions,
    progress: Callable[[int], None] = lambda nbytes: None,
    *,
    numbers: Collection[int] | None = None,
    journal: Journal = NO_JOURNAL,
) -> None:
    """Write the plan's files below ``folder``: all, or those of ``numbers`` (places in the layout).

    ``root`` is the folder of the source's files; ``progress`` is told of bytes as they are
    written; ``journal`` of each finished file, and it names those that need not be written again.
    Raises Damaged where source bytes differ from the checksum their writer stored or a
    file ends early, TransferError where writing fails, CannotDo where the budget is too small.
    """
    mine = range(len(plan.layout.files)) if numbers is None else numbers
    finished = [n for n in mine if _is_finished(plan.layout.files[n], folder, journal)]
    todo = [n for n in mine if n not in set(finished)]
    _Transfer(plan, root, folder, _within_budget(plan, options), progress).run(
        todo, finished, journal
    )


def peak_memory(plan: Plan, options: RunOptions) -> int:
    """The most bytes of memory that a run takes for tiles, source spans and decoded blobs."""
    workers = _within_budget(plan, options).workers
    return workers * (_TILE + GATHER_BYTES + plan.largest_blob)


def _within_budget(plan: Plan, options: RunOptions) -> RunOptions:
    """Fewer workers where the budget is small; CannotDo where not even one fits."""
    per_worker = _MINIMUM_PER_WORKER + plan.largest_blob
    if per_worker > options.budget:
        raise CannotDo(
            f"a budget of {options.budget:,} bytes is too small: one worker needs {per_worker:,}",
            hint=f"--budget {-(-per_worker // (1 << 20))}MiB",
        )
    workers = max(1, min(options.workers, options.budget // per_worker))
    return RunOptions(workers, options.budget, options.fsync)


def _is_finished(file: FileLayout, folder: Path, journal: Journal) -> bool:
    path = folder / file.path
    return journal.has(file.path) and path.is_file() and path.stat().st_size == file.nbytes


Run = tuple[Extent, int, int, int]
"""A run of bytes: its place, file offset, output offset and length."""


def straight_runs(tile: Tile) -> list[Run] | None:
    """The runs of bytes that a tile is made of.

    None where an element must be gathered, repaired or cast.
    """
    if tile.entry.stored not in (None, tile.entry.dtype):
        return None
    runs = [run_of(tile, source) for source in tile.sources]
    whole = [run for run in runs if run is not None]
    return whole if len(whole) == len(runs) else None


def run_of(tile: Tile, source: Source) -> Run | None:
    """The run of bytes that one source of a tile is, or None where it is not one as it lies."""
    at, where = source.chunk.at, source.where
    itemsize = tile.entry.source_dtype.itemsize
    if not isinstance(at, Extent) or at.ops or where.shape[1:] != tile.shape[1:]:
        return None
    if not contiguous(at.strides, source.box.shape, itemsize):
        return None
    local = source.box.relative_to(source.chunk.box.lo).lo
    start = at.offset + sum(i * s for i, s in zip(local, at.strides, strict=True))
    skip = where.lo[0] * math.prod(tile.shape[1:]) * itemsize if where.lo else 0
    return at, start, tile.offset + skip, source.box.volume * itemsize


class _Transfer:
    """One run of a plan: the files that are still to be written, and what is known of each."""

    def __init__(
        self,
        plan: Plan,
        root: str,
        folder: Path,
        options: RunOptions,
        progress: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._files = plan.layout.files
        self._root = root
        self._folder = folder
        self._options = options
        self._progress = progress
        self._records = RecordCheck()
        self._crcs: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        self._lock = threading.Lock()
        self._left: dict[int, int] = {}
        self._wanted: set[tuple[int, int]] = set()

    def run(self, todo: Sequence[int], finished: Sequence[int], journal: Journal) -> None:
        """Write the files ``todo``; what the ``finished`` ones were made from is checked again."""
        self._journal = journal
        for number in finished:
            for tiles in self._jobs([number]):
                for tile in tiles:
                    self._touch(tile)
            self._progress(self._files[number].nbytes)
        self._on_threads(self._write_jobs(todo), self._write_tiles)
        self._on_threads(iter(self._records.unseen()), self._check_record)
        problems = self._records.problems()
        if problems:
            raise damaged(
                problems,
                subject="the source's data",
                hint="the bytes changed after they were written; take another copy of the file",
            )
        for number in todo:
            if self._left[number] == 0:
                self._finish(number)

    def _write_jobs(self, todo: Sequence[int]) -> Iterator[list[Tile]]:
        """The jobs of all files, a batch of files after the other."""
        for start in range(0, len(todo), _BATCH):
            batch = todo[start : start + _BATCH]
            for number in batch:
                self._create(self._files[number])
            yield from self._jobs(batch)

    def _jobs(self, numbers: Sequence[int]) -> Iterator[list[Tile]]:
        """The jobs of some files, whose parts are made here and forgotten with the last job."""
        made = [(number, self._files[number].parts) for number in numbers]
        groups = self._plan.groups(made, _TILE)
        for number, parts in made:
            self._left[number] = 0
            self._wanted |= {
                (number, patch.part)
                for part in parts
                if isinstance(part, Literal)
                for patch in part.patches
            }
        for group in groups:
            for number, count in group.tile_counts(_TILE):
                self._left[number] += count
        for group in groups:
            yield from self._plan.jobs(group, _TILE)

    def _touch(self, tile: Tile) -> None:
        for source in tile.sources:
            at = source.chunk.at
            if isinstance(at, Extent) and at.record is not None:
                self._records.touch(at.record, tile.entry.name)

    def _on_threads(self, jobs: Iterator[Job], work: Callable[[_Worker, Job], None]) -> None:
        """Share jobs among the workers; the first error stops all and is raised."""
        share_jobs(
            jobs,
            self._options.workers,
            lambda: _Worker(self._root, self._folder, self._note_piece),
            work,
        )

    def _create(self, file: FileLayout) -> None:
        path = self._folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as stream:
            allocate(stream.fileno(), file.nbytes)

    def _write_tiles(self, worker: _Worker, tiles: list[Tile]) -> None:
        for tile in tiles:
            self._write_tile(worker, tile, shared=len(tiles) > 1)

    def _write_tile(self, worker: _Worker, tile: Tile, *, shared: bool) -> None:
        runs = straight_runs(tile)
        if runs is not None and (tile.file, tile.part) not in self._wanted:
            self._copy_runs(worker, tile, runs)
        else:
            self._gather_tile(worker, tile, shared=shared)
        self._count(tile)

    def _copy_runs(self, worker: _Worker, tile: Tile, runs: list[Run]) -> None:
        self._touch(tile)
        for at, start, offset, nbytes in runs:
            crc = worker.copy(at.file, start, self._files[tile.file].path, offset, nbytes)
            if at.record is not None:
                self._records.piece(at.record, start, nbytes, crc)

    def _gather_tile(self, worker: _Worker, tile: Tile, *, shared: bool) -> None:
        values = worker.gather(tile, shared=shared)
        crc = self._note_source(tile, values)
        if tile.entry.stored is not None and tile.entry.stored != tile.entry.dtype:
            values = cast(values, tile.entry.stored, tile.entry.dtype)
            crc = None
        data = raw(values)
        part = (tile.file, tile.part)
        if part in self._wanted:
            piece = (tile.offset, len(data), crc32(data) if crc is None else crc)
            self._crcs[part].append(piece)
        worker.write(self._files[tile.file].path, tile.offset, data)

    def _count(self, tile: Tile) -> None:
        """One tile more is written; the last of a file finishes it."""
        self._progress(math.prod(tile.shape) * tile.entry.dtype.itemsize)
        with self._lock:
            self._left[tile.file] -= 1
            last = not self._left[tile.file]
        if last:
            self._finish(tile.file)
            self._left[tile.file] = -1

    def _note_source(self, tile: Tile, values: Array) -> int | None:
        """Note each run of a record that the tile read; its CRC where it is the whole tile."""
        crc = None
        self._touch(tile)
        for source in tile.sources:
            run = run_of(tile, source)
            if run is None:
                continue
            at, start, _, nbytes = run
            if at.record is None:
                continue
            where = source.where
            crc = crc32(raw(values[where.lo[0] : where.hi[0]] if where.lo else values))
            self._records.piece(at.record, start, nbytes, crc)
        return crc if len(tile.sources) == 1 else None

    def _note_piece(self, record: Record, offset: int, data: memoryview) -> None:
        self._records.piece(record, offset, len(data), crc32(data))

    def _check_record(self, worker: _Worker, record: Record) -> None:
        total, buffer = 0, memoryview(bytearray(_TILE))
        for start in range(0, record.nbytes, _TILE):
            piece = buffer[: min(_TILE, record.nbytes - start)]
            worker.gatherer.read_into(record.file, record.offset + start, piece)
            total = crc32(piece, total)
        self._records.whole(record, total)

    def _finish(self, number: int) -> None:
        """Write what is not tensor data, sync the file, and note that it is done."""
        file = self._files[number]
        with open(self._folder / file.path, "r+b") as stream:
            offset = 0
            for part in file.parts:
                if isinstance(part, Literal):
                    stream.seek(offset)
                    stream.write(self._patched(number, part))
                elif isinstance(part, Verbatim):
                    stream.seek(offset)
                    stream.writelines(_pieces(os.path.join(self._root, part.file)))
                    if stream.tell() != offset + part.nbytes:
                        raise Damaged(f"{part.file}: its size changed while it was copied")
                    self._progress(part.nbytes)
                offset += part.nbytes
            stream.flush()
            if self._options.fsync:
                os.fsync(stream.fileno())
        self._journal.done(file.path)

    def _patched(self, number: int, literal: Literal) -> bytes:
        data = bytearray(literal.data)
        for patch in literal.patches:
            crc = joined(self._crcs[number, patch.part])
            data[patch.at : patch.at + 4] = crc.to_bytes(4, "little")
        return bytes(data)


def _pieces(path: str) -> Iterable[bytes]:
    with open(path, "rb") as stream:
        while piece := stream.read(_TILE):
            yield piece


class _Worker:
    """What one thread owns: its descriptors and its buffers."""

    def __init__(self, root: str, folder: Path, noted: Noted) -> None:
        self.gatherer = Gatherer(root, noted)
        self._folder = folder
        self._buffer = bytearray(_TILE)
        self._open: dict[str, int] = {}

    def gather(self, tile: Tile, *, shared: bool) -> Array:
        """The tile's elements, in the source's element type, in an array of the tile's shape.

        ``shared`` says that further tiles will need the same rows of the source.
        """
        dtype = tile.entry.source_dtype
        nbytes = math.prod(tile.shape) * dtype.itemsize
        buffer = self._buffer if nbytes <= _TILE else bytearray(nbytes)
        values: Array = np.frombuffer(buffer, "u1", nbytes).view(unit(dtype.itemsize))
        values = values.reshape(tile.shape)
        for source in tile.sources:
            where = source.where
            view = values[tuple(map(slice, where.lo, where.hi))] if where.lo else values
            self.gatherer.fill(view, source.chunk, source.box, dtype, shared=shared)
        return values

    def copy(self, file: str, start: int, path: str, offset: int, nbytes: int) -> int:
        """Copy a run of bytes from the source to an output file; returns its CRC-32."""
        crc, buffer = 0, memoryview(self._buffer)[:_PIECE]
        for done in range(0, nbytes, len(buffer)):
            piece = buffer[: min(len(buffer), nbytes - done)]
            self.gatherer.read_into(file, start + done, piece)
            crc = crc32(piece, crc)
            self.write(path, offset + done, piece)
        return crc

    def write(self, path: str, offset: int, data: memoryview) -> None:
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= _MOST_OPEN:
                self._close_outputs()
            descriptor = os.open(f"{self._folder}/{path}", os.O_WRONLY | os.O_CLOEXEC)
            self._open[path] = descriptor
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(descriptor, data[done : done + _PIECE], offset + done)
            except OSError as error:
                raise TransferError(f"{path}: {error.strerror} at byte {offset + done:,}") from None

    def close(self) -> None:
        self.gatherer.close()
        self._close_outputs()

    def _close_outputs(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
