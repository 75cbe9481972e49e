"""Output made in parts by independent processes; another one commits it.

Each part has a rank's journal, which records the number of parts. The journal ends with a note of
the part once all its files are written, synced and compared: names, sizes and times, including that
of the last change of anything, which nothing sets back; and what it read of records that no part
reads whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptool.core.layout import Layout
from ckptool.core.text import list_some
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.run_options import StageOptions
from ckptool.engine.share import Share
from ckptool.engine.write.existing import remove_own, require_space, require_whole
from ckptool.engine.write.journal import (
    Journal,
    is_journal,
    read_part,
    require_same_run,
    require_untouched,
)
from ckptool.engine.write.stage import Stage
from ckptool.errors import Unsupported
from ckptool.storage.disk import sync_folder
from ckptool.storage.file_status import FileStatus

CONTINUES = "the finished files are kept; the same command continues"
COMMITS = "what the parts wrote is kept; the same command commits it"


class PartStage(Stage):
    """The stage of one part: begun by whichever comes first, and continued by all."""

    def __init__(self, target: Path, layout: Layout, options: StageOptions, share: Share) -> None:
        super().__init__(target, layout, options)
        self._share = share
        self._names: list[str] = []
        self.joined = RecordCheck(shared=not share.is_all)

    def begin(self) -> None:
        """Open this part's journal, new or as an earlier run left it, and make the folder.

        Raises Unsupported if the target exists, does not fit, another process writes this part, or
        the others are parts of another run.
        """
        self.finish_earlier()
        self.require_possible()
        path, options = self._journal_path(self._share.position), self._options
        begun = (options.plan, options.source)
        size, state = self._share.size, options.source_state
        try:
            self._is_new = not path.exists()
            if not options.verify:
                require_untouched([path], state)
            self.journal = Journal.resume(path, *begun, (), self._sizes, size, state)
            self._refuse_existing()
            self._require_no_link()
        except OSError as error:
            why = error.strerror
            raise Unsupported(f"{self.target.parent}: cannot be written to: {why}") from None
        for other in self._journals():
            if other.stat().st_size:
                head, _ = read_part(other)
                require_same_run(str(other), head, run_head(*begun, self._share.size))

    def require_possible(self) -> None:
        """Raise Unsupported if the target exists and may not be replaced, or does not fit."""
        self._require_ours()
        self._refuse_existing()
        require_space(self.target.parent, self._layout.nbytes, self.folder, self._sizes)

    def join(self, rank: int = 0) -> None:
        """Do nothing: the journal is open."""

    def mark(self, token: str) -> None:
        """Do nothing: no other process is waited for."""

    def is_marked(self, token: str) -> bool:
        """Return True: no other process is waited for."""
        return True

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return the files of this part: all of its share."""
        taken = list(numbers)
        self._names = [self._layout.files[number].path for number in taken]
        return taken

    def commit(self) -> str | None:
        """Note that this part is done."""
        require_whole(self.folder, {name: self._sizes[name] for name in self._names})
        if self._options.fsync:
            for folder in {self.folder, *((self.folder / name).parent for name in self._names)}:
                sync_folder(folder)
        files = _marks(self.folder, self._names)
        self.journal.end(end_of_part(self._options, files, self.note_joined()))
        return None

    def next_step(self) -> str | None:
        """Return how to continue a part that ended midway."""
        return CONTINUES if self.is_partial() else None

    def discard(self, *, resumed: bool = False) -> None:
        """Remove what this part wrote; a resumed part only if requested."""
        if self.journal.is_open and (self._is_new or resumed):
            with suppress(OSError):
                remove_own(self.folder, self._names)
                self._journal_path(self._share.position).unlink()
                if not self._journals():
                    self.folder.rmdir()
        self.journal.close()


class PartsStage(Stage):
    """The stage that all parts have written, to be committed."""

    def __init__(self, target: Path, layout: Layout, options: StageOptions) -> None:
        super().__init__(target, layout, options)
        self._locked: list[Journal] = []

    def require_possible(self) -> None:
        """Raise Unsupported if the target may not be replaced, or a part is not done."""
        self._require_ours()
        self._refuse_existing()
        prefix = f"{self.folder.name}.journal."
        numbered = {path.name.removeprefix(prefix): path for path in self._journals()}
        read = {int(n): read_part(path) for n, path in numbered.items() if n.isdecimal()}
        parts = {number: part for number, part in read.items() if part[0]}  # others had just begun
        ended = require_parts(self.target, parts, self._options)
        self.noted = [part.get("joined", ()) for _, part in parts.values()]
        for number, files in enumerate(ended):
            now = _marks(self.folder, files)
            changed = [name for name in files if now.get(name) != files[name]]
            if changed:
                raise damaged_part(self.target, number, len(ended), changed)

    def begin(self) -> None:
        """Keep all others from writing; raise Unsupported if one does, or a part is not done."""
        self.finish_earlier()
        self._locked = [Journal.lock(path) for path in self._journals() if is_journal(path)]
        self.require_possible()

    def join(self, rank: int = 0) -> None:
        """Do nothing: everything is written."""

    def mark(self, token: str) -> None:
        """Do nothing: only one process commits."""

    def is_marked(self, token: str) -> bool:
        """Return True: only one process commits."""
        return True

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return none: the parts have written all files."""
        return []

    def next_step(self) -> str | None:
        """Return how to continue if the commit failed."""
        return COMMITS if self._locked else None

    def discard(self, *, resumed: bool = False) -> None:
        """Keep what the parts wrote."""
        self.close()

    def close(self) -> None:
        """Let others write here."""
        for journal in self._locked:
            journal.close()


def _marks(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Return a record of files, as in JSON, that shows if they were written to; follows no link.

    Without inodes, which sshfs and other file systems in user space renumber on each machine.
    """
    found = {}
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            status = FileStatus.of(os.lstat(folder / name))
            found[name] = [status.nbytes, status.modified, status.changed]
    return found


def run_head(plan: str, source: str, parts: int) -> dict[str, object]:
    """Return the common beginning of the journals of all parts of one run."""
    return {"plan": plan, "source": source, "parts": parts}


def end_of_part(
    options: StageOptions, files: Mapping[str, Any], joined: Sequence[object]
) -> dict[str, object]:
    """Return the note of a finished part, with the stamps or versions of its files.

    ``joined`` are the records of which it noted runs, for the process that commits to check.
    """
    state = {"verified": options.verify, "source": options.source_state}
    return {**state, "files": files, "joined": joined}


def require_parts(
    target: object,
    parts: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]],
    options: StageOptions,
) -> Sequence[Mapping[str, Any]]:
    """Return the files of each part, as noted at its end.

    ``parts`` are how each journal begins and ends, by the part's number from 0 on. Raises
    Unsupported if they are of another run, or one is not done.
    """
    if not parts:
        raise Unsupported(
            f"{target}: no parts found", hint="first run each with --part K/N, K from 1 to N"
        )
    count = next(iter(parts.values()))[0].get("parts")
    count = count if isinstance(count, int) else 0
    for number, (head, _) in parts.items():
        what = f"part {number + 1} of {target}"
        require_same_run(what, head, run_head(options.plan, options.source, count or -1))
    wrong = [number + 1 for number in range(count) if not parts.get(number, ({}, {}))[1]]
    _require_none(target, wrong, count, "not done")
    if options.verify:
        wrong = [number + 1 for number in range(count) if not parts[number][1].get("verified")]
        _require_none(target, wrong, count, "not verified", or_else=", or give --no-verify")
    wrong = [n + 1 for n in range(count) if parts[n][1].get("source") != options.source_state]
    _require_none(target, wrong, count, "of a source that was written to, or touched, since")
    return [parts[number][1]["files"] for number in range(count)]


def _require_none(
    target: object, numbers: Sequence[int], count: int, why: str, or_else: str = ""
) -> None:
    if numbers:
        what = f"part {numbers[0]}" if len(numbers) == 1 else f"{len(numbers):,} parts"
        listed = "" if len(numbers) == 1 else f": {list_some(list(map(str, numbers)), 8)}"
        are = "is" if len(numbers) == 1 else "are"
        raise Unsupported(
            f"{target}: {what} of {count} {are} {why}{listed}",
            hint=f"the same command with --part {numbers[0]}/{count} in place of --finish{or_else}",
        )


def damaged_part(target: object, number: int, count: int, files: Sequence[str]) -> Unsupported:
    """Return the error for a part whose files are not as it left them."""
    return Unsupported(
        f"{target}: {list_some(files)} of part {number + 1} of {count}: missing, or changed since",
        hint=f"the same command with --part {number + 1}/{count} in place of --finish writes what"
        " is not as it was",
    )
