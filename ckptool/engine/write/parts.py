"""Output made in parts by independent processes; another one commits it.

Each part has a rank's journal, which records the number of parts. The journal ends with a note of
the part once all its files are written, synced and compared: names, sizes and times, including that
of the last change of anything, which nothing sets back; and what it read of records that no part
reads whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptool.core.layout import Layout
from ckptool.core.text import list_some
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.run_options import StageOptions
from ckptool.engine.share import Share
from ckptool.engine.write.existing import remove_own, require_space, require_whole, statuses
from ckptool.engine.write.joined import NotedRecord
from ckptool.engine.write.journal import (
    Journal,
    read_journal,
    require_same_run,
    require_untouched,
)
from ckptool.engine.write.schemas import FileMark, JournalHead, PartEnd, PartNote
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
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if not options.verify:
                require_untouched([path], state)
            self.journal = Journal.resume(path, *begun, (), self._sizes, size, state)
            self._refuse_existing()
            self._require_no_link()
        except OSError as error:
            why = error.strerror
            raise Unsupported(f"{self.target.parent}: cannot be written to: {why}") from None
        for other in self._journals():
            if (head := read_journal(other).head) is not None:
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
        numbered = {int(path.suffix[1:]): read_journal(path) for path in self._journals()}
        parts = {n: PartState(each.head, each.end) for n, each in numbered.items() if each.head}
        ended = require_parts(self.target, parts, self._options, self._sizes)
        self.noted = [end.joined for end in ended]
        for number, end in enumerate(ended):
            now = _marks(self.folder, end.files)
            changed = [name for name, mark in end.files.items() if now.get(name) != mark]
            if changed:
                raise damaged_part(self.target, number, len(ended), changed)

    def begin(self) -> None:
        """Keep all others from writing; raise Unsupported if one does, or a part is not done."""
        self.finish_earlier()
        self._locked = [Journal.lock(path) for path in self._journals()]
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


def _marks(folder: Path, names: Iterable[str]) -> dict[str, FileMark]:
    """Return a record of files that shows if they were written to; follows no link.

    Without inodes, which sshfs and other file systems in user space renumber on each machine.
    """
    found = {name: FileStatus.of(status) for name, status in statuses(folder, names).items()}
    return {name: (now.nbytes, now.modified, now.changed) for name, now in found.items()}


class PartState(Struct, frozen=True):
    """How the note of a part begins, and its end once the part is done."""

    head: JournalHead | PartNote
    end: PartEnd[Any] | None


def run_head(plan: str, source: str, parts: int) -> dict[str, object]:
    """Return the common beginning of the journals of all parts of one run."""
    return {"plan": plan, "source": source, "parts": parts}


def end_of_part(
    options: StageOptions, files: dict[str, Any], joined: list[NotedRecord]
) -> PartEnd[Any]:
    """Return the note of a finished part, with the stamps or versions of its files."""
    return PartEnd(options.verify, options.source_state, files, joined)


def require_parts(
    target: object,
    parts: Mapping[int, PartState],
    options: StageOptions,
    written: Iterable[str],
) -> list[PartEnd[Any]]:
    """Return the end of each part.

    ``parts`` are by the part's number from 0 on, ``written`` the files that they must have written
    together. Raises Unsupported if they are of another run, or one is not done.
    """
    if not parts:
        raise Unsupported(
            f"{target}: no parts found", hint="first run each with --part K/N, K from 1 to N"
        )
    count = next(iter(parts.values())).head.parts or 0
    for number, part in parts.items():
        what = f"part {number + 1} of {target}"
        require_same_run(what, part.head, run_head(options.plan, options.source, count or -1))
    ends = {number: part.end for number, part in parts.items() if part.end is not None}
    _require_none(target, [n + 1 for n in range(count) if n not in ends], count, "not done")
    ended = [ends[number] for number in range(count)]
    if options.verify:
        wrong = [n for n, end in enumerate(ended, 1) if not end.verified]
        _require_none(target, wrong, count, "not verified", or_else=", or give --no-verify")
    wrong = [n for n, end in enumerate(ended, 1) if end.source != options.source_state]
    _require_none(target, wrong, count, "of a source that was written to, or touched, since")
    others = {name for end in ended for name in end.files} ^ set(written)
    if others or len(parts) > count:
        named = list_some(sorted(others)) if others else f"{len(parts):,} parts"
        raise Unsupported(
            f"{target}: {named}: not what {count} parts of this run write",
            hint="write the parts again elsewhere",
        )
    return ended


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
