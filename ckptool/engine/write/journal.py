"""The record of a transfer's finished files, so that a killed one can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ckptool.core.layout import FileLayout
from ckptool.core.plan import Plan
from ckptool.engine.checksum import crc_of
from ckptool.engine.read.tiles import ByteSource, byte_job, read_tiles
from ckptool.engine.run_options import RunOptions
from ckptool.errors import Unsupported
from ckptool.storage.disk import begins_with, identity, in_the_way, is_real_file, open_unfollowed
from ckptool.storage.local import CORES, LocalSource

_SCHEMA = "ckptool.journal/1"
_MARK = f'{{"schema": "{_SCHEMA}"'.encode()


class Journal:
    """An append-only list of finished files, kept beside the folder that they are staged in.

    The first line has the digests of the plan and of the source's files, and in the first process's
    journal the files to be written with their sizes; each further line a finished file with the
    CRC-32 of its bytes. The open file is locked: two processes never write one stage.
    """

    def __init__(self, stream: IO[str] | None, finished: Mapping[str, int] | None = None) -> None:
        self._stream = stream
        self._finished = finished or {}
        self._lock = threading.Lock()

    @classmethod
    def start(cls, path: Path, plan: str, source: str) -> Journal:
        """Start a new journal; Unsupported if another process holds it."""
        journal = cls.lock(path)
        journal.begin(plan, source)
        return journal

    @classmethod
    def lock(cls, path: Path) -> Journal:
        """Open the journal as it is and lock it; Unsupported if another process has it."""
        return cls(_open_locked(path))

    def begin(self, plan: str, source: str, **more: object) -> None:
        """Empty the journal, and begin with these digests and other facts."""
        if self._stream is not None:
            self._stream.truncate(0)
        self._append(journal_head(plan, source) | more)

    @classmethod
    def resume(
        cls,
        path: Path,
        plan: str,
        source: str,
        others: Iterable[Path] = (),
        files: Mapping[str, int] | None = None,
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
        stream = _open_locked(path)
        finished: dict[str, int] = {}
        head = {"plan": plan, "source": source} | ({} if parts is None else {"parts": parts})
        try:
            begun = [journal for journal in {path, *others} if journal.stat().st_size]
            for journal in begun:
                finished |= _read_finished(journal, head)
        except Unsupported:
            stream.close()
            raise
        resumed = cls(stream, finished)
        was_part = parts is None and path in begun and "parts" in read_part(path)[0]
        if path not in begun or was_part:
            more = {"parts": parts, "files": files, "state": state}
            resumed.begin(plan, source, **{k: v for k, v in more.items() if v is not None})
        if was_part:
            for name, crc in finished.items():
                resumed.done(name, crc)
        return resumed

    def crc_of(self, path: str) -> int | None:
        """Return the CRC-32 of a file that an earlier run finished; None if none did."""
        return self._finished.get(path)

    def done(self, path: str, crc: int) -> None:
        """Note that a file is written (and synced, if requested), with the CRC-32 of its bytes."""
        self._append({"done": path, "crc32": crc})

    def end(self, part: Mapping[str, object]) -> None:
        """Note that this journal's part of a run is done, with its description."""
        self._append({"part": part})
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

    def _append(self, line: Mapping[str, object]) -> None:
        if self._stream is None:
            return
        with self._lock:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()


NO_JOURNAL = Journal(None)


def read_part(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first line of a part's journal, and its last; empty if the part is not done."""
    lines = _read_lines(path)
    part: Any = lines[-1].get("part") if lines else None
    is_done = isinstance(part, dict) and isinstance(part.get("files"), dict)
    return (lines[0] if lines else {}), (part if is_done else {})


def require_untouched(journals: Iterable[Path], state: str) -> None:
    """Raise Unsupported if a journal began with another ``state`` of the source's files."""
    for path in filter(Path.exists, journals):
        if read_part(path)[0].get("state", state) != state:
            why = "the source was written to, or touched, since the run began"
            raise Unsupported(
                f"{path}: cannot resume: {why}",
                hint="leave out --no-verify: the output is then compared with the source",
            )


def require_no_parts(target: object, journals: Iterable[Path]) -> None:
    """Raise Unsupported if a journal says that a run in parts writes a target."""
    for path in journals:
        head, _ = read_part(path)
        if head.get("parts"):
            raise unfinished_parts(target, head["parts"])


def unfinished_parts(target: object, count: int) -> Unsupported:
    """Return the error for a run, not in parts, that would remove the output of parts."""
    return Unsupported(
        f"{target}: holds the unfinished output of a run in {count} parts",
        hint="--part K/N continues each, --finish ends it, and --overwrite starts over",
    )


def journal_head(plan: str, source: str) -> dict[str, object]:
    """Return the beginning of an output's note: the digests of the plan and the source."""
    return {"schema": _SCHEMA, "plan": plan, "source": source}


def is_journal(path: Path) -> bool:
    """Return whether a file is a journal, or one that a killed run had only just created."""
    return is_real_file(path) and begins_with(path, _MARK)


def noted_sizes(paths: Iterable[Path], expected: Mapping[str, int]) -> dict[str, int]:
    """Return the files that journals list as being written, with the larger of the sizes.

    ``expected`` are those of a run that starts over: a truncated journal lists none.
    """
    sizes = dict(expected)
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as stream:
            files = _parse_line(stream.readline()).get("files")
        if isinstance(files, dict):
            for name, size in files.items():
                if isinstance(size, int):
                    sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def _open_locked(path: Path) -> IO[str]:
    descriptor = open_unfollowed(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if not is_journal(path):
        os.close(descriptor)
        raise in_the_way(path)
    stream = open(descriptor, "a+", encoding="utf-8")  # noqa: SIM115 (kept open for its lock)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if identity(path) != os.fstat(descriptor).st_ino:
            raise BlockingIOError  # its owner is done, and has removed it
    except OSError:
        stream.close()
        raise Unsupported(f"{path}: another ckptool is writing this target") from None
    return stream


def _read_finished(path: Path, expected: Mapping[str, object]) -> dict[str, int]:
    """Return the files that a journal lists with their CRC-32; its head must be as expected."""
    lines = _read_lines(path)
    require_same_run(str(path), lines[0] if lines else {}, expected)
    files = ((line.get("done"), line.get("crc32")) for line in lines[1:])
    return {name: crc for name, crc in files if isinstance(name, str) and isinstance(crc, int)}


def require_same_run(path: str, head: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise Unsupported if a journal begins with other digests, or parts, than expected."""
    for what, value in expected.items():
        if head.get(what) == value:
            continue
        if "parts" not in expected:
            raise Unsupported(
                f"{path}: cannot resume: the {what} has changed since the run began",
                hint="run again without --resume to start over",
            )
        begun = f"in {head['parts']} parts" if "parts" in head else "without --part"
        why = f"the run began {begun}" if what == "parts" else f"the {what} is another"
        raise Unsupported(
            f"{path}: cannot continue: {why}",
            hint="all parts need the same SRC, options and number of parts; to start over, remove"
            " what the others wrote: this file and those beside it with the same prefix",
        )


def _read_lines(path: Path) -> list[dict[str, object]]:
    """Return the lines of a journal, {} for a damaged one, without a truncated last line."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [_parse_line(line) for line in text.split("\n")[:-1]]


def _parse_line(line: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def find_finished(
    plan: Plan, numbers: Collection[int], folder: Path, options: RunOptions, journal: Journal
) -> list[int]:
    """Return those of the files that an earlier run finished and that are unchanged."""
    files = plan.layout.files
    whole: dict[int, FileLayout] = {}
    for number in numbers:
        file, path = files[number], folder / files[number].path
        noted = journal.crc_of(file.path) is not None
        if noted and is_real_file(path) and path.stat().st_size == file.nbytes:
            whole[number] = file
    same: list[int] = []

    def compare(number: int, tiles: Iterator[memoryview]) -> None:
        if crc_of(tiles) == journal.crc_of(files[number].path):
            same.append(number)

    source = ByteSource(LocalSource(folder, {file.path: file.nbytes for file in whole.values()}))
    jobs = (byte_job(number, file.path, 0, file.nbytes) for number, file in whole.items())
    read_tiles(source, jobs, compare, options.workers or CORES)
    return sorted(same)
