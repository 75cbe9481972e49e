"""The records of a transfer's finished files, so that a killed one can be resumed.

They are beside the staging folder: one for each rank, or part, that writes into it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from msgspec import Struct

from ckptool.core.layout import FileLayout
from ckptool.engine.checksum import crc_of
from ckptool.engine.read.byte_reader import ByteSource, byte_job
from ckptool.engine.read.tiles import read_tiles
from ckptool.engine.write.schemas import (
    SCHEMA,
    FileMark,
    FinishedFile,
    FinishedPart,
    JournalHead,
    PartEnd,
    require_same_run,
)
from ckptool.engine.write.work import Work
from ckptool.errors import Unsupported
from ckptool.storage.disk import identity, in_the_way
from ckptool.storage.files import CORES
from ckptool.storage.local import LocalSource
from ckptool.storage.note import dump_note, open_note, parse_note, read_note

_MARK = f'{{"schema": "{SCHEMA}"'.encode()
_TOKEN = re.compile(b"[0-9a-f]{0,16}")


class JournalNotes(Struct, frozen=True):
    """The content of a journal: its first line, the finished files with their CRC-32, and its end.

    ``end`` is that of a part which is done. Whole lines have ``nbytes``: a killed run may leave
    half a line. All fields are empty if the run was killed as it began.
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

    def __init__(self, path: Path) -> None:
        """Open the journal as it is and lock it; Unsupported if another process has it."""
        self.path = path
        self._stream = _open_locked(path)
        self.finished: dict[str, int] = {}
        """The CRC-32 of each file that an earlier run finished."""
        self._lock = threading.Lock()

    def begin(self, head: JournalHead) -> None:
        """Empty the journal, and begin with a first line."""
        self._stream.truncate(0)
        self._append(head)

    def resume(self, head: JournalHead, other_paths: Iterable[Path] = ()) -> None:
        """Go on with what an earlier run of the same plan over the same source noted here.

        ``other_paths`` are journals that further ranks kept of the same output. The ``head`` is
        written if the run begins here, or is no longer shared: notes of parts are then kept, and no
        part continues. Raises Unsupported, and closes the journal, if they are of another run.
        """
        expected: dict[str, object] = {"plan": head.plan, "source": head.source}
        expected |= {} if head.parts is None else {"parts": head.parts}
        try:
            notes_by_path = {path: read_journal(path) for path in {self.path, *other_paths}}
            for path, notes in notes_by_path.items():
                if notes.head is not None:
                    require_same_run(path, notes.head, expected)
                    self.finished |= notes.finished
            self._go_on(notes_by_path[self.path], head)
        except BaseException:
            self.close()
            raise

    def _go_on(self, notes: JournalNotes, head: JournalHead) -> None:
        """Begin this journal, unless it was begun: then cut off half a line."""
        was_part = notes.head is not None and notes.head.parts and not head.parts
        if notes.head is None or was_part:
            self.begin(head)
        else:
            self._stream.truncate(notes.nbytes)
        if was_part:
            for name, crc in self.finished.items():
                self.done(name, crc)

    def done(self, path: str, crc: int) -> None:
        """Note that a file is written (and synced, if requested), with the CRC-32 of its bytes."""
        self._append(FinishedFile(path, crc))

    def end(self, part: PartEnd[FileMark]) -> None:
        """Note that this journal's part of a run is done, with its description."""
        self._append(FinishedPart(part))
        os.fsync(self._stream.fileno())

    @property
    def is_open(self) -> bool:
        """Whether this process holds the file."""
        return not self._stream.closed

    def close(self) -> None:
        """Close the file, which unlocks it."""
        self._stream.close()

    def _append(self, line: Struct) -> None:
        # not synced: what a power failure takes of it costs no more than to write files again
        with self._lock:
            self._stream.write(f"{dump_note(line).decode()}\n")
            self._stream.flush()


def read_journal(path: Path) -> JournalNotes:
    """Return what a journal says; Unsupported if it is not as ckptool writes it.

    Half a line at its end is left out.
    """
    data = read_note(path, mark=_MARK)
    *lines, rest = data.split(b"\n")
    if not lines:
        return JournalNotes()
    head = parse_note(lines[0], JournalHead, path)
    finished: dict[str, int] = {}
    end = None
    for line in lines[1:]:
        if line.startswith(b'{"part"'):
            end = parse_note(line, FinishedPart, path).part
        else:  # a part that writes on is not done any more
            done, end = parse_note(line, FinishedFile, path), None
            finished[done.done] = done.crc32
    return JournalNotes(head, finished, end, len(data) - len(rest))


def _open_locked(path: Path) -> IO[str]:
    descriptor = open_note(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    stream = open(descriptor, "a+", encoding="utf-8")  # noqa: SIM115 (kept open for its lock)
    try:  # flock: a lock of fcntl ends when its process closes any descriptor of the file
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if identity(path) != os.fstat(descriptor).st_ino:
            raise BlockingIOError  # its owner is done, and has removed it
        read_journal(path)
    except BaseException as error:
        stream.close()
        if isinstance(error, BlockingIOError | FileNotFoundError):  # has it, or has just removed it
            raise Unsupported(f"{path}: another ckptool is writing this target") from None
        if isinstance(error, OSError):
            message, hint = f"{path}: cannot be locked: {error.strerror}", "write to another disk"
            raise Unsupported(message, hint=hint) from None
        raise
    return stream


class Journals:
    """The journals of one output by their numbers, and those that this process holds.

    Number 0 is the first rank's, or part's; who holds it begins and commits a whole output. A mark
    beside the journals shows processes whether they see the same disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix = f"{folder.name}.journal."
        self._mark = folder.with_name(f"{self._prefix}mark")
        self.held: dict[int, Journal] = {}

    def path(self, number: int) -> Path:
        """Return where the journal of this number is, if it is."""
        return self._folder.with_name(f"{self._prefix}{number}")

    def find(self) -> dict[int, Path]:
        """Return the journals that exist, by number."""
        journal = re.compile(re.escape(self._prefix) + "(0|[1-9][0-9]{0,5})")
        names: list[str] = []
        with suppress(FileNotFoundError, PermissionError):
            names = os.listdir(self._folder.parent)
        paths = sorted(self._folder.with_name(n) for n in names if journal.fullmatch(n))
        return {int(path.suffix[1:]): path for path in paths}

    def read(self) -> dict[int, JournalNotes]:
        """Read the journals that are there; Unsupported if one is not as ckptool writes it."""
        notes = {}
        for number, path in self.find().items():
            with suppress(FileNotFoundError):  # its process has ended just now
                notes[number] = read_journal(path)
        return notes

    def heads(self) -> dict[int, JournalHead]:
        """Return the first lines of the journals that have one, by number."""
        return {n: notes.head for n, notes in self.read().items() if notes.head is not None}

    def require_ours(self) -> None:
        """Raise Unsupported if a journal, or the mark beside journals, is not ckptool's."""
        notes = self.read()
        with suppress(FileNotFoundError):
            token = read_note(self._mark)
            if not (notes and _TOKEN.fullmatch(token)):
                raise in_the_way(self._mark)

    def require_untouched(self, state: str, numbers: Iterable[int]) -> None:
        """Raise Unsupported if some of them began with another ``state`` of the source's files."""
        heads = self.heads()
        for number in numbers:
            if number in heads and heads[number].state not in (None, state):
                why = "the source was written to, or touched, since the run began"
                raise Unsupported(
                    f"{self.path(number)}: cannot resume: {why}",
                    hint="leave out --no-verify: the output is then compared with the source",
                )

    def noted_sizes(self, expected: Mapping[str, int]) -> dict[str, int]:
        """Return the files that are listed as being written, with the larger of the sizes.

        ``expected`` are those of a run that starts over: a truncated journal lists none.
        """
        sizes = dict(expected)
        for head in self.heads().values():
            for name, size in (head.files or {}).items():
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    def hold(self, number: int) -> Journal:
        """Open a journal as it is and lock it; Unsupported if another process has it."""
        journal = self.held[number] = Journal(self.path(number))
        return journal

    def require_idle(self) -> None:
        """Raise Unsupported if another process, such as one that writes a part, has a journal."""
        for number, path in self.find().items():
            if number:  # who asks holds the first one, or is about to
                Journal(path).close()

    def mark(self, token: str) -> None:
        """Leave a mark that is visible to all processes on this disk."""
        with open(open_note(self._mark, os.O_WRONLY | os.O_CREAT), "wb") as stream:
            stream.truncate()
            stream.write(token.encode())

    def is_marked(self, token: str) -> bool:
        """Return whether the mark is visible here."""
        return self._mark.is_file() and read_note(self._mark) == token.encode()

    def remove(self) -> None:
        """Remove the mark and all journals, the first one last."""
        self._mark.unlink(missing_ok=True)
        # the lock of the first one keeps others from beginning until all are gone
        for path in reversed(self.find().values()):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others write here."""
        for journal in self.held.values():
            journal.close()


def find_finished(work: Work, folder: Path, journal: Journal) -> list[int]:
    """Return those of the files that an earlier run finished and that are unchanged."""
    files = work.plan.layout.files
    noted = [n for n in work.numbers if files[n].path in journal.finished]
    whole = {files[n].path: files[n].nbytes for n in noted if _is_whole(folder, files[n])}
    numbers: list[int] = []

    def compare(number: int, tiles: Iterator[memoryview]) -> None:
        if crc_of(tiles) == journal.finished[files[number].path]:
            numbers.append(number)

    source = ByteSource(LocalSource(folder, whole))
    compared = ((n, files[n]) for n in noted if files[n].path in whole)
    jobs = (byte_job(number, file.path, 0, file.nbytes) for number, file in compared)
    read_tiles(source, jobs, compare, work.options.workers or CORES)
    return sorted(numbers)


def _is_whole(folder: Path, file: FileLayout) -> bool:
    """Return whether a file has its size, and is no other folder's file too, by a hard link."""
    with suppress(FileNotFoundError):
        now = os.lstat(folder / file.path)
        return stat.S_ISREG(now.st_mode) and now.st_nlink == 1 and now.st_size == file.nbytes
    return False
