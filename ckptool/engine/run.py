"""Plan -> bytes: gather, cast, checksum, write; on several threads, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptool.core.layout import FileLayout, Literal, Part, Verbatim
from ckptool.core.plan import Plan, Tile
from ckptool.engine.allocate import allocate
from ckptool.engine.checksum import RecordCheck, joined
from ckptool.engine.journal import NO_JOURNAL, Journal
from ckptool.engine.threads import Job, share_jobs
from ckptool.engine.worker import MEMORY, TILE, Worker, touch
from ckptool.errors import CannotDo, Damaged, damaged

_MINIMUM_PER_WORKER = 16 << 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``budget`` in bytes of memory for tiles, source spans and decoded blobs together.

    More workers than cores only wait for each other: reads from a disk are the kernel's to order.
    """

    workers: int = min(8, os.cpu_count() or 1)
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
    _Transfer(plan, root, folder, within_budget(plan, options), progress).run(
        todo, finished, journal
    )


def peak_memory(plan: Plan, options: RunOptions) -> int:
    """The most bytes of memory that a run takes for tiles, source spans and decoded blobs."""
    workers = within_budget(plan, options).workers
    return workers * (MEMORY + plan.largest_blob)


def within_budget(plan: Plan, options: RunOptions) -> RunOptions:
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
        for batch in self._plan.batches(finished):
            for tiles in self._jobs(batch):
                for tile in tiles:
                    touch(self._records, tile)
        self._progress(sum(self._files[number].nbytes for number in finished))
        self._on_threads(self._write_jobs(todo), self._write_tiles)
        self._on_threads(iter(self._records.unseen()), Worker.check_record)
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
        for batch in self._plan.batches(todo):
            for number, _ in batch:
                self._create(self._files[number])
            yield from self._jobs(batch)

    def _jobs(self, batch: list[tuple[int, tuple[Part, ...]]]) -> Iterator[list[Tile]]:
        """The jobs of some files with their parts."""
        groups = self._plan.groups(batch, TILE)
        for number, parts in batch:
            self._left[number] = 0
            self._wanted |= {
                (number, patch.part)
                for part in parts
                if isinstance(part, Literal)
                for patch in part.patches
            }
        for group in groups:
            for number, count in group.tile_counts(TILE):
                self._left[number] += count
        for group in groups:
            yield from self._plan.jobs(group, TILE)

    def _on_threads(self, jobs: Iterator[Job], work: Callable[[Worker, Job], None]) -> None:
        """Share jobs among the workers; the first error stops all and is raised."""
        share_jobs(
            jobs,
            self._options.workers,
            lambda: Worker(self._root, self._folder, self._records),
            work,
        )

    def _create(self, file: FileLayout) -> None:
        path = self._folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as stream:
            allocate(stream.fileno(), file.nbytes)

    def _write_tiles(self, worker: Worker, tiles: list[Tile]) -> None:
        worker.forget_rows()
        for tile in tiles:
            crc = worker.write_tile(
                tile,
                self._files[tile.file].path,
                shared=len(tiles) > 1,
                checked=(tile.file, tile.part) in self._wanted,
            )
            self._count(tile, crc)

    def _count(self, tile: Tile, crc: int | None) -> None:
        """One tile more is written, with this CRC-32; the last of a file finishes it."""
        self._progress(tile.nbytes)
        with self._lock:
            if crc is not None:
                self._crcs[tile.file, tile.part].append((tile.offset, tile.nbytes, crc))
            self._left[tile.file] -= 1
            last = not self._left[tile.file]
        if last:
            self._finish(tile.file)
            self._left[tile.file] = -1

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
        while piece := stream.read(TILE):
            yield piece
