"""Output appears completely or not at all: staged beside the target, synced, then moved."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ckptool.core.layout import Layout
from ckptool.engine.run_options import StageOptions
from ckptool.engine.write.commit import Commit, FileCommit, FolderCommit, aside_of, is_in_place
from ckptool.engine.write.existing import (
    in_conflict,
    left_behind,
    not_replaced,
    remove_staged,
    require_no_conflict,
    require_no_foreign,
    require_short_names,
    require_space,
    require_whole,
    staged_files,
    stamps,
)
from ckptool.engine.write.joined import Joining
from ckptool.engine.write.journal import (
    Journal,
    noted_sizes,
    read_journal,
    require_no_parts,
    require_untouched,
)
from ckptool.engine.write.run import run
from ckptool.engine.write.schemas import JournalHead
from ckptool.engine.write.work import Work
from ckptool.errors import Unsupported
from ckptool.storage.commit_note import CommitNote, NoteFile, side_name, staging_folder
from ckptool.storage.disk import (
    first_stranger,
    folder_identity,
    identity,
    in_the_way,
    is_real_folder,
    sync_folder,
)
from ckptool.storage.local import LocalSource
from ckptool.storage.note import open_note, read_note, require_own_folder

if TYPE_CHECKING:
    from ckptool.engine.write.remote_stage import RemoteStage

Output: TypeAlias = "Stage | RemoteStage"
"""Where a transfer writes. One process begins it; others that write into it join."""

_TOKEN = re.compile(b"[0-9a-f]{0,16}")
RESUME_HINT = "the finished files are kept; the same command with --resume continues"


class Stage(Joining):
    """A hidden folder beside the target, and journals of what is finished in it.

    One process makes it (``begin``); others that write into it ``join``. Each keeps its own
    journal. Only ``commit`` touches the target: no file need be written last.
    """

    last_files: tuple[int, ...] = ()

    def __init__(self, target: Path, layout: Layout, options: StageOptions) -> None:
        self.target = target
        self.folder = staging_folder(target)
        self._layout = layout
        self._options = options
        self.journal = self._first = Journal(None)
        self._is_new = False
        self._begun: CommitNote | None = None
        self._note = NoteFile(target, fsync=options.fsync)

    def finish_earlier(self) -> bool:
        """Finish the commit in which an earlier run was killed.

        Return whether ``resume`` has nothing left to do: the output that it would write is in
        place.
        """
        note = self._note.read()
        if note is None:
            return False
        self._require_notes()
        if os.path.lexists(self.folder) and folder_identity(self.folder) in (None, note.new):
            require_own_folder(self.folder)
        self._first = Journal.lock(self._journal_path(0))
        done = False
        try:
            commit = self._commit(folder=note.folder)
            done = not self._is_gone() and commit.roll(note)
            if done:
                commit.clear(note)
                self._forget()
            else:
                self._note.remove()
        except OSError as error:
            raise left_behind(self.target, error, done=done) from None
        finally:
            self._first.close()
        asked = (self._options.plan, self._options.source)
        return done and self._options.resume and (note.plan, note.source) == asked

    def _is_gone(self) -> bool:
        """Return whether the target was removed after it was put in place: nothing is left of it.

        A user may well remove the output of a killed run before the next one.
        """
        places = (self.target, aside_of(self.target))
        staged = is_real_folder(self.folder) and os.listdir(self.folder)
        return not staged and not any(map(os.path.lexists, places))

    def stands(self) -> bool:
        """Return whether something is at the target."""
        return os.path.lexists(self.target)

    def begin(self) -> None:
        """Make the folder, or with ``resume`` take over an earlier run's.

        Raises Unsupported if the target exists, does not fit, or there is nothing to resume.
        """
        self.finish_earlier()
        self.require_possible()
        path, run = self._journal_path(0), (self._options.plan, self._options.source)
        if self._options.resume:
            self._require_idle(self._journals())
            if not self._options.verify:
                require_untouched(self._journals(), self._options.source_state)
            state = self._options.source_state
            Journal.resume(path, *run, self._journals(), self._sizes, state=state).close()
            self._require_idle(self._journals())  # no part begins from here on
            self._require_no_link()
            return
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._first = Journal.lock(path)
            self._remove_earlier()
            self._is_new = True
            state = self._options.source_state
            self._first.begin(JournalHead(*run, files=self._sizes, state=state))
            self._require_idle(self._journals())
            self.folder.mkdir()
        except OSError as error:
            place, why = self.target.parent, error.strerror
            raise Unsupported(f"{place}: cannot be written to: {why}") from None
        finally:
            if not self._is_new:
                self._first.close()

    def _remove_earlier(self) -> None:
        """Remove what an earlier run staged; Unsupported if something else is there."""
        journals = self._journals()
        self._require_idle(journals)
        if is_real_folder(self.folder):
            remove_staged(self.folder, noted_sizes(journals, self._sizes))
        for path in journals:
            if path != self._journal_path(0):
                path.unlink()

    def _require_idle(self, journals: Iterable[Path]) -> None:
        """Raise Unsupported if another process, such as one that writes a part, has a journal."""
        for path in journals:
            if path != self._journal_path(0):
                Journal.lock(path).close()

    @property
    def _sizes(self) -> dict[str, int]:
        """The files that this run writes, with their sizes in bytes."""
        return {file.path: file.nbytes for file in self._layout.files}

    def _require_no_link(self) -> None:
        """Raise Unsupported if a link in the folder would be written through."""
        self.folder.mkdir(exist_ok=True)
        require_own_folder(self.folder)
        stranger = first_stranger(self.folder)
        if stranger is not None:
            raise in_the_way(stranger)

    def require_possible(self) -> None:
        """Raise Unsupported if the target exists and may not be replaced, or does not fit."""
        self._require_ours()
        self._refuse_existing()
        if not (self._options.resume or self._options.overwrite):
            require_no_parts(self.target, self._journals())
        if not self._options.resume:
            require_space(self.target.parent, self._layout.nbytes, self.folder, self._sizes)
        elif not self.is_partial():
            raise Unsupported(f"{self.target}: there is no partial output to resume")

    def _require_ours(self) -> None:
        """Raise Unsupported if a needed name is too long, or not ckptool's."""
        folder, beside = self.target.parent, f"{self._note.path.name}.new"
        hint = "shorten the target's name: this name is derived from it"
        require_short_names(folder, [beside], hint)
        require_short_names(folder, self._sizes, "--rename or --drop the tensors named so")
        self._require_notes()
        if os.path.lexists(self.folder):
            if not self._journals():
                raise in_the_way(self.folder)
            require_own_folder(self.folder)
        if os.path.lexists(aside_of(self.target)):
            raise in_the_way(aside_of(self.target))

    def _require_notes(self) -> None:
        """Raise Unsupported if a journal, or the mark beside journals, is not ckptool's."""
        journals = self._journals()
        for path in journals:
            with suppress(FileNotFoundError):  # its process has ended just now
                read_journal(path)
        with suppress(FileNotFoundError):
            token = read_note(self._mark)
            if not (journals and _TOKEN.fullmatch(token)):
                raise in_the_way(self._mark)

    def join(self, rank: int = 0) -> None:
        """Open this rank's journal, after ``begin``."""
        path, options = self._journal_path(rank), self._options
        if rank == 0 and self._is_new:
            self.journal = self._first
        elif options.resume:
            others = self._journals()
            sizes = self._sizes if rank == 0 else None
            self.journal = Journal.resume(path, options.plan, options.source, others, sizes)
            if rank == 0:
                require_no_foreign(self.folder, self._sizes)
        else:
            self.journal = Journal.start(path, options.plan, options.source)

    def write(self, work: Work) -> None:
        """Write files of the plan."""
        run(work, self.folder, self.journal, self.joined)

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return the files of a share that are written before the commit: here all."""
        return list(numbers)

    @property
    def written(self) -> LocalSource:
        """The files that are staged, to be read back."""
        return staged_files(self.folder, self._sizes)

    def mark(self, token: str) -> None:
        """Leave a mark that is visible to all processes on this disk."""
        with open(open_note(self._mark, os.O_WRONLY | os.O_CREAT), "wb") as stream:
            stream.truncate()
            stream.write(token.encode())

    def is_marked(self, token: str) -> bool:
        """Return whether the mark is visible here."""
        return self._mark.is_file() and read_note(self._mark) == token.encode()

    @property
    def _mark(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.journal.mark")

    @cached_property
    def own(self) -> Collection[str] | None:
        """The files of the checkpoint at the target, once one is known to be there."""
        return self._options.own()

    def _commit(self, *, folder: bool) -> Commit:
        if folder:
            return FolderCommit(self.target, self.folder, self._note, fsync=self._options.fsync)
        return FileCommit(self.target, self.folder, self._note, overwrite=self._options.overwrite)

    def commit(self) -> str | None:
        """Make the staged files the target; return a remark if that took several steps.

        An error before that leaves the old one unchanged; one after it is Committed.
        """
        self._refuse_existing()
        require_no_foreign(self.folder, self._sizes)
        require_whole(self.folder, self._sizes)
        if self._options.fsync:
            for path, _, _ in os.walk(self.folder):
                sync_folder(Path(path))
        commit, self._begun = self._commit(folder=self._layout.folder), self._new_note()
        remark = commit.replace(self._begun)
        try:
            self._begun = self._note.read() or self._begun
            if self._options.fsync:
                sync_folder(self.target.parent)
            commit.clear(self._begun)
            if self._options.fsync:
                sync_folder(self.target.parent)
            self._forget()
        except OSError as error:
            raise left_behind(self.target, error) from None
        return remark

    def is_committed(self) -> bool:
        """Return whether the output is at the target, whatever is left to be cleaned up."""
        commit = self._commit(folder=self._layout.folder)
        return self._begun is not None and is_in_place(commit, self._note, self._begun)

    def _new_note(self) -> CommitNote:
        options = self._options
        names = [file.path for file in self._layout.files]
        staged = self.folder if self._layout.folder else self.folder / names[-1]
        new, old = identity(staged) or 0, identity(self.target)
        folder = self.target if self._layout.folder else self.target.parent.resolve()
        own = {} if self.own is None else stamps(folder, sorted(self.own))
        files = stamps(self.folder, names)
        return CommitNote(options.plan, options.source, self._layout.folder, new, old, own, files)

    def is_partial(self) -> bool:
        """Return whether there is something that a run with ``resume`` continues."""
        return bool(self._journals())

    def next_step(self) -> str | None:
        """Return how to continue a run that ended midway; None if there is nothing to continue."""
        return RESUME_HINT if self.is_partial() else None

    def close(self) -> None:
        """Let others write here."""
        self.journal.close()

    def remains(self) -> str | None:
        """Return None: a disk lets a process remove what it wrote itself."""
        return None

    def discard(self, *, resumed: bool = False) -> None:
        """Remove what this process staged; a resumed output only if requested.

        If something else is in it all of it stays, and the next run reports that.
        """
        self.journal.close()
        if not self._is_new and not resumed:
            return
        with suppress(OSError, Unsupported):
            if is_real_folder(self.folder):
                remove_staged(self.folder, self._sizes)
            self._forget()

    def outputs(self) -> list[Path]:
        """Return what will exist at the end: the target folder, or file and those beside it."""
        if self._layout.folder:
            return [self.target]
        files = [self.target.parent / file.path for file in self._layout.files]
        side = side_name(self.target.name)
        if side is None or self.target.with_name(side) in files:
            return files
        return [self.target.with_name(side), *files]

    def _journal_path(self, rank: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}.journal.{rank}")

    def _journals(self) -> list[Path]:
        journal = re.compile(re.escape(f"{self.folder.name}.journal.") + "(0|[1-9][0-9]{0,5})")
        names: list[str] = []
        with suppress(FileNotFoundError, PermissionError):
            names = os.listdir(self.folder.parent)
        return sorted(self.folder.with_name(n) for n in names if journal.fullmatch(n))

    def _forget(self) -> None:
        """Remove all notes of this output, the commit's last."""
        self._mark.unlink(missing_ok=True)
        for path in reversed(self._journals()):
            path.unlink(missing_ok=True)
        self._note.remove()
        self.journal.close()
        self._first.close()

    def _refuse_existing(self) -> None:
        paths = self.outputs()[-1:] if self._options.resume else self.outputs()
        existing = [path for path in paths if os.path.lexists(path)]
        if existing and not self._options.overwrite:
            exist, them = ("exists", "it") if len(existing) == 1 else ("exist", "them")
            raise Unsupported(
                f"{', '.join(map(str, existing))} already {exist}",
                hint=f"--overwrite replaces {them} once all is written",
            )
        for path in existing:
            self._require_replaceable(path)

    def _require_replaceable(self, path: Path) -> None:
        """Raise Unsupported if --overwrite would replace a file that is not a checkpoint's."""
        if path.is_dir() != self._layout.folder:
            kinds = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
            raise Unsupported(f"{path}: is {kinds[0]}, but {kinds[1]} would be written")
        own = self.own
        if not self._layout.folder:
            if own is None or path.name not in own:
                raise not_replaced(path, self.target)
            return
        if path.is_symlink():
            raise Unsupported(
                f"{path}: is a link, and is not replaced", hint=f"name the folder {path.resolve()}"
            )
        if any(path.iterdir()) and own is None:
            raise not_replaced(path, self.target)
        names = [file.path for file in self._layout.files]
        require_no_conflict(path, in_conflict(path, own or (), names))
