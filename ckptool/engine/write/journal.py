"""The record of a transfer's finished files, so that a killed one can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from msgspec import Struct

from ckptool.core.layout import FileLayout
from ckptool.core.plan import Plan
from ckptool.engine.checksum import crc_of
from ckptool.engine.read.tiles import ByteSource, byte_job, read_tiles
from ckptool.engine.run_options import RunOptions
from ckptool.engine.write.schemas import (
    SCHEMA,
    FileMark,
    FinishedFile,
    FinishedPart,
    JournalHead,
    PartEnd,
    json_of,
)
from ckptool.errors import Unsupported
from ckptool.storage.disk import identity, in_the_way
from ckptool.storage.local import CORES, LocalSource
from ckptool.storage.note import open_note, parse_note, read_note

_MARK = f'{{"schema": "{SCHEMA}"'.encode()


class Noted(Struct, frozen=True):
    """What a journal says: how it begins, the finished files with their CRC-32, and its end.

    ``end`` is that of a part which is done. The ``nbytes`` of whole lines say it: a killed run may
    leave half a line. All of it is empty if the run was killed as it began.
    """

    head: JournalHead | None = None
    finished: Mapping[str, int] = {}
    end: PartEnd[FileMark] | None = None
    nbytes: int = 0


class Journal:
    """An append-only list of finished files, kept beside the folder that they are staged in.

    The first line has the digests of the plan and of the source's files, and in the first process's
    journal the files to be written with their sizes; each further line a finished file with the
    CRC-32 of its bytes. The open file is locked: two processes never write one stage.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self._finished: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def start(cls, path: Path, plan: str, source: str) -> Journal:
        """Start a new journal; Unsupported if another process holds it."""
        journal = cls.lock(path)
        journal.begin(JournalHead(plan, source))
        return journal

    @classmethod
    def lock(cls, path: Path) -> Journal:
        """Open the journal as it is and lock it; Unsupported if another process has it."""
        return cls(_open_locked(path))

    def begin(self, head: JournalHead) -> None:
        """Empty the journal, and begin with a first line."""
        if self._stream is not None:
            self._stream.truncate(0)
        self._append(head)

    @classmethod
    def resume(
        cls,
        path: Path,
        plan: str,
        source: str,
        others: Iterable[Path] = (),
        files: dict[str, int] | None = None,
        parts: int | None = None,
        state: str | None = None,
    ) -> Journal:
        """Open the journal of an earlier run of the same plan over the same source.

        ``others`` are journals that further ranks kept of the same output, ``files`` the sizes of
        those to be written, to be noted if they are not; ``parts`` is into how many the run is
        shared, ``state`` that of the source if the run begins here. Notes of parts are kept if the
        run is no longer shared, and no part continues from then on. Raises Unsupported if these are
        not those of the earlier run.
        """
        resumed = cls.lock(path)
        expected = {"plan": plan, "source": source} | ({} if parts is None else {"parts": parts})
        try:
            noted = {journal: read_journal(journal) for journal in {path, *others}}
            for journal, each in noted.items():
                if each.head is not None:
                    require_same_run(str(journal), each.head, expected)
                    resumed._finished |= each.finished
            resumed._go_on(noted[path], JournalHead(plan, source, parts, files, state))
        except BaseException:
            resumed.close()
            raise
        return resumed

    def _go_on(self, before: Noted, head: JournalHead) -> None:
        """Begin this journal, unless it was begun: then cut off half a line."""
        was_part = before.head is not None and before.head.parts and not head.parts
        if before.head is None or was_part:
            self.begin(head)
        elif self._stream is not None:
            self._stream.truncate(before.nbytes)
        if was_part:
            for name, crc in self._finished.items():
                self.done(name, crc)

    def crc_of(self, path: str) -> int | None:
        """Return the CRC-32 of a file that an earlier run finished; None if none did."""
        return self._finished.get(path)

    def done(self, path: str, crc: int) -> None:
        """Note that a file is written (and synced, if requested), with the CRC-32 of its bytes."""
        self._append(FinishedFile(path, crc))

    def end(self, part: PartEnd[FileMark]) -> None:
        """Note that this journal's part of a run is done, with its description."""
        self._append(FinishedPart(part))
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    @property
    def is_open(self) -> bool:
        """Whether this process holds the file."""
        return self._stream is not None and not self._stream.closed

    def close(self) -> None:
        """Close the file, which unlocks it."""
        if self._stream is not None:
            self._stream.close()

    def _append(self, line: Struct) -> None:
        if self._stream is None:
            return
        with self._lock:
            self._stream.write(json.dumps(json_of(line)) + "\n")
            self._stream.flush()


NO_JOURNAL = Journal(None)


def read_journal(path: Path) -> Noted:
    """Return what a journal says; Unsupported if it is not as ckptool writes it.

    Half a line at its end is left out.
    """
    data = read_note(path)
    if not (data.startswith(_MARK) or _MARK.startswith(data)):
        raise in_the_way(path)
    *lines, rest = data.split(b"\n")
    if not lines:
        return Noted()
    head = parse_note(lines[0], JournalHead, path)
    finished: dict[str, int] = {}
    end = None
    for line in lines[1:]:
        if line.startswith(b'{"part"'):
            end = parse_note(line, FinishedPart, path).part
        else:
            done, end = parse_note(line, FinishedFile, path), None
            finished[done.done] = done.crc32
    return Noted(head, finished, end, len(data) - len(rest))


def require_untouched(journals: Iterable[Path], state: str) -> None:
    """Raise Unsupported if a journal began with another ``state`` of the source's files."""
    for path in filter(Path.exists, journals):
        head = read_journal(path).head
        if head is not None and head.state not in (None, state):
            why = "the source was written to, or touched, since the run began"
            raise Unsupported(
                f"{path}: cannot resume: {why}",
                hint="leave out --no-verify: the output is then compared with the source",
            )


def require_no_parts(target: object, journals: Iterable[Path]) -> None:
    """Raise Unsupported if a journal says that a run in parts writes a target."""
    for path in journals:
        head = read_journal(path).head
        if head is not None and head.parts:
            raise unfinished_parts(target, head.parts)


def unfinished_parts(target: object, count: int) -> Unsupported:
    """Return the error for a run, not in parts, that would remove the output of parts."""
    return Unsupported(
        f"{target}: holds the unfinished output of a run in {count} parts",
        hint="--part K/N continues each, --finish ends it, and --overwrite starts over",
    )


def noted_sizes(paths: Iterable[Path], expected: Mapping[str, int]) -> dict[str, int]:
    """Return the files that journals list as being written, with the larger of the sizes.

    ``expected`` are those of a run that starts over: a truncated journal lists none.
    """
    sizes = dict(expected)
    for path in paths:
        head = read_journal(path).head
        for name, size in ((head and head.files) or {}).items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def _open_locked(path: Path) -> IO[str]:
    descriptor = open_note(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    stream = open(descriptor, "a+", encoding="utf-8")  # noqa: SIM115 (kept open for its lock)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if identity(path) != os.fstat(descriptor).st_ino:
            raise BlockingIOError  # its owner is done, and has removed it
        read_journal(path)
    except OSError:
        stream.close()
        raise Unsupported(f"{path}: another ckptool is writing this target") from None
    except BaseException:
        stream.close()
        raise
    return stream


def require_same_run(path: str, head: Struct | None, expected: Mapping[str, object]) -> None:
    """Raise Unsupported if a note begins with other digests, or parts, than expected."""
    for what, value in expected.items():
        if getattr(head, what, None) == value:
            continue
        if "parts" not in expected:
            raise Unsupported(
                f"{path}: cannot resume: the {what} has changed since the run began",
                hint="run again without --resume to start over",
            )
        parts = getattr(head, "parts", None)
        begun = f"in {parts} parts" if parts else "without --part"
        why = f"the run began {begun}" if what == "parts" else f"the {what} is another"
        raise Unsupported(
            f"{path}: cannot continue: {why}",
            hint="all parts need the same SRC, options and number of parts; to start over, remove"
            " what the others wrote: this file and those beside it with the same prefix",
        )


def find_finished(
    plan: Plan, numbers: Collection[int], folder: Path, options: RunOptions, journal: Journal
) -> list[int]:
    """Return those of the files that an earlier run finished and that are unchanged."""
    files = plan.layout.files
    whole: dict[int, FileLayout] = {}
    for number in numbers:
        file, path = files[number], folder / files[number].path
        is_noted = journal.crc_of(file.path) is not None
        if is_noted and os.path.lexists(path) and _is_whole(os.lstat(path), file.nbytes):
            whole[number] = file
    same: list[int] = []

    def compare(number: int, tiles: Iterator[memoryview]) -> None:
        if crc_of(tiles) == journal.crc_of(files[number].path):
            same.append(number)

    source = ByteSource(LocalSource(folder, {file.path: file.nbytes for file in whole.values()}))
    jobs = (byte_job(number, file.path, 0, file.nbytes) for number, file in whole.items())
    read_tiles(source, jobs, compare, options.workers or CORES)
    return sorted(same)


def _is_whole(status: os.stat_result, nbytes: int) -> bool:
    """Return whether a file has its size, and is no other folder's file too, by a hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == nbytes
