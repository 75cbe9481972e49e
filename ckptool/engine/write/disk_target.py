"""A target on a disk: output is staged beside it, synced, then moved into its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptool.core.layout import Layout
from ckptool.engine.share import Share
from ckptool.engine.write.commit import Commit, FileCommit, FolderCommit, aside_of
from ckptool.engine.write.existing import (
    left_behind,
    nothing_to_resume,
    refuse_existing,
    remove_own,
    remove_staged,
    require_no_foreign,
    require_whole,
    stamps,
    statuses,
)
from ckptool.engine.write.journal import Journal, Journals
from ckptool.engine.write.parts import PartState, run_head, unfinished_parts
from ckptool.engine.write.room import require_short_names, require_space
from ckptool.engine.write.run import run
from ckptool.engine.write.schemas import (
    FileMark,
    JournalHead,
    PartEnd,
    require_same_old,
    require_same_run,
)
from ckptool.engine.write.stage import WHOLE, StageOptions, Target
from ckptool.engine.write.work import Work
from ckptool.errors import Unsupported, refused_hint
from ckptool.storage.commit_note import CommitNote, NoteFile, Stamp, staging_folder
from ckptool.storage.disk import (
    first_stranger,
    folder_identity,
    identity,
    in_the_way,
    is_real_folder,
    sync_folder,
)
from ckptool.storage.file_status import FileStatus
from ckptool.storage.local import LocalSource
from ckptool.storage.note import require_own_folder


def was_to_replace(path: Path) -> bool:
    """Return whether an interrupted run was asked to replace what is at its target."""
    head = Journals(staging_folder(path)).heads().get(0)
    return head is not None and head.overwrite


class DiskTarget(Target):
    """A hidden folder beside the target, and journals of what is finished in it.

    Each process that writes into it keeps a journal of its own, numbered by rank or by part, and
    locked. The journal of a part ends with a note of it. Only ``publish`` touches the target.
    """

    path: Path

    def __init__(self, path: Path, layout: Layout, options: StageOptions) -> None:
        self.path = path
        self.folder = staging_folder(path)
        self.is_new = False
        self._layout = layout
        self._sizes = layout.sizes
        self._options = options
        self._role = options.role
        self._journals = Journals(self.folder)
        self._journal: Journal | None = None
        self._commit_note: CommitNote | None = None
        self._note = NoteFile(path, fsync=options.fsync)

    # What is there

    def require_possible(self) -> None:
        """Raise Unsupported if the target exists and may not be replaced, or does not fit."""
        self._require_ours()
        refuse_existing(self.path, self._layout, self._options)
        role, options = self._role, self._options
        if role.finishes:
            return
        if not (options.resume or options.overwrite):
            for head in self._journals.heads().values():
                if head.parts:
                    raise unfinished_parts(self.path, head.parts)
        if role.part is not None or not options.resume:
            require_space(self.path.parent, self.folder, self._sizes)
        elif not self.is_partial():
            raise nothing_to_resume(self.path)
        elif self._note.read() is None:  # else a commit was begun
            self._require_same_old()

    def _require_ours(self) -> None:
        """Raise Unsupported if a needed name is too long, or not ckptool's."""
        folder, new_note = self.path.parent, f"{self._note.path.name}.new"
        hint = "shorten the target's name: this name is derived from it"
        # first of all: names that are too long cannot even be looked for
        require_short_names(folder, [new_note], hint)
        require_short_names(folder, self._sizes, "--rename or --drop the tensors named so")
        self._journals.require_ours()
        if os.path.lexists(self.folder):
            if not self._journals.find():
                raise in_the_way(self.folder)
            require_own_folder(self.folder)
        if os.path.lexists(aside_of(self.path)):
            raise in_the_way(aside_of(self.path))

    def _old(self) -> tuple[int | None, dict[str, Stamp]]:
        """Return the inode of what is at the target, and the stamps of its checkpoint's files."""
        folder = self.path if self._layout.folder else self.path.parent.resolve()
        return identity(self.path), stamps(folder, sorted(self._options.own or ()))

    def _require_same_old(self) -> None:
        """Raise Unsupported if a whole output would replace what its run was not asked to."""
        if self._options.overwrite and self._role == WHOLE:
            require_same_old(self.path, self._journals.heads().get(0), *self._old())

    # Claim

    def hold_parts(self) -> None:
        """Keep all parts from writing on; Unsupported if one is being written."""
        for number in self._journals.find():
            self._journals.hold(number)

    def claim(self) -> None:
        """Begin the output or a part of it, or take over what an earlier run began.

        Raises Unsupported if another process writes here, or another run's part is here.
        """
        part, options = self._role.part, self._options
        if self._role.finishes:
            return
        if part is None and options.resume:
            self._take_over()
            return
        try:
            if part is None:
                self._begin()
            else:
                self._begin_part(part)
        except OSError as error:
            message = f"{self.path.parent}: cannot be written to: {error.strerror}"
            raise Unsupported(message, hint=refused_hint(error)) from None
        if part is not None:  # of two that begin at once, one sees the other's note
            for number, head in self._journals.heads().items():
                require_same_run(self._journals.path(number), head, run_head(options, part.size))

    def _begin(self) -> None:
        """Remove what an earlier run staged, and make the folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        journals, first = self._journals, self._journals.hold(0)
        earlier = journals.find()
        journals.require_idle()
        if is_real_folder(self.folder):
            remove_staged(self.folder, journals.noted_sizes(self._sizes))
        for number, path in earlier.items():
            if number:
                path.unlink()
        self.is_new = True
        first.begin(self._first_head())
        # again: a part that began meanwhile either finds this first line, or has a journal by now
        journals.require_idle()
        self.folder.mkdir()

    def _take_over(self) -> None:
        """Note that this run continues an earlier one, and that no part of it does."""
        journals, state = self._journals, self._options.source_state
        journals.require_idle()
        if not self._options.verify:
            journals.require_untouched(state, journals.find())
        head = self._first_head()
        journals.hold(0).resume(head, journals.find().values())
        journals.require_idle()  # no part begins from here on
        self._require_no_link()
        require_no_foreign(self.folder, self._sizes)

    def _begin_part(self, part: Share) -> None:
        """Open the part's journal, new or as an earlier run left it, and make the folder."""
        number, state = part.position, self._options.source_state
        self.is_new = not self._journals.path(number).exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._options.verify:
            self._journals.require_untouched(state, [number])
        self._journal = self._journals.hold(number)
        self._journal.resume(self._first_head(parts=part.size))
        # again: --finish may have committed before the journal was held
        refuse_existing(self.path, self._layout, self._options)
        self._require_no_link()

    def join(self, rank: int) -> None:
        """Open the journal of a rank that shares the whole output; what was claimed is open."""
        if self._role != WHOLE:
            return
        journals = self._journals
        if rank == 0:
            self._journal = journals.held[0]
            return
        self._journal = journals.hold(rank)
        if self._options.resume:
            self._journal.resume(self._head(), journals.find().values())
        else:
            self._journal.begin(self._head())

    def _first_head(self, **more: Any) -> JournalHead:
        """Return the first line of the journal of a run's first process, or of a part."""
        options = self._options
        old, old_files = self._old() if options.overwrite else (None, {})
        more |= {"overwrite": options.overwrite, "old": old, "own": old_files}
        return self._head(files=self._sizes, state=options.source_state, **more)

    def _head(self, **more: Any) -> JournalHead:
        """Return the first line of a journal of this run."""
        return JournalHead(self._options.plan, self._options.source, **more)

    def _require_no_link(self) -> None:
        """Make the folder; raise Unsupported if a link in it would be written through."""
        self.folder.mkdir(exist_ok=True)
        require_own_folder(self.folder)
        stranger = first_stranger(self.folder)
        if stranger is not None:
            raise in_the_way(stranger)

    def mark(self, token: str) -> None:
        """Leave a mark that is visible to all ranks on this disk."""
        if self._role == WHOLE:
            self._journals.mark(token)

    def is_marked(self, token: str) -> bool:
        """Return whether the mark is visible here; True if no other process is waited for."""
        return self._role != WHOLE or self._journals.is_marked(token)

    # Write

    def write(self, work: Work) -> None:
        """Write files of the plan into the folder."""
        run(work, self.folder, self._journal)

    @property
    def written(self) -> LocalSource:
        """The files that are staged, to be read back."""
        sizes = {name: nbytes for name, (nbytes, _) in stamps(self.folder, self._sizes).items()}
        return LocalSource(self.folder, sizes)

    def parts(self) -> Mapping[int, PartState]:
        """Return the notes of parts, by their numbers."""
        notes = self._journals.read()
        return {n: PartState(note.head, note.end) for n, note in notes.items() if note.head}

    def marks(self, names: Iterable[str]) -> dict[str, FileMark]:
        """Return the sizes and times of files, including the time of the last change of anything.

        Nothing sets that time back. Inodes are left out: sshfs and other file systems in user space
        renumber them on each machine.
        """
        files = {n: FileStatus.of(status) for n, status in statuses(self.folder, names).items()}
        return {name: (now.nbytes, now.modified, now.changed) for name, now in files.items()}

    def seal(self, names: Sequence[str]) -> dict[str, FileMark]:
        """Sync the folders of files that are written; TransferError if one is lost."""
        require_whole(self.folder, {name: self._sizes[name] for name in names})
        if self._options.fsync:
            for folder in {self.folder, *((self.folder / name).parent for name in names)}:
                sync_folder(folder)
        return self.marks(names)

    def end_part(self, end: PartEnd[Any]) -> None:
        """Note that the part is done."""
        if self._journal is not None:  # as it is since the claim
            self._journal.end(end)

    # Commit

    def publish(self) -> str | None:
        """Make the staged files the target; return a remark if that took several steps.

        An error before that leaves the old one unchanged; one after it is Committed.
        """
        self._require_same_old()
        refuse_existing(self.path, self._layout, self._options)
        require_no_foreign(self.folder, self._sizes)
        require_whole(self.folder, self._sizes)
        if self._options.fsync:  # after a power failure the new names must not lead to lost files
            for path, _, _ in os.walk(self.folder):
                sync_folder(Path(path))
        commit, self._commit_note = self._commit(folder=self._layout.folder), self._new_note()
        remark = commit.replace(self._commit_note)
        try:
            if self._options.fsync:  # the old one goes once the new one is in place for good
                sync_folder(self.path.parent)
            commit.clear(self._commit_note)
            if self._options.fsync:  # and the notes go once nothing is left to do by them
                sync_folder(self.path.parent)
            self._forget()
        except OSError as error:
            raise left_behind(self.path, error, self._options) from None
        return remark

    def is_published(self) -> bool:
        """Return whether the output is at the target, whatever is left to be cleaned up."""
        commit = self._commit(folder=self._layout.folder)
        return self._commit_note is not None and commit.is_done(self._commit_note)

    def _commit(self, *, folder: bool) -> Commit:
        if folder:
            return FolderCommit(self.path, self.folder, self._note, fsync=self._options.fsync)
        return FileCommit(self.path, self.folder, self._note, overwrite=self._options.overwrite)

    def _new_note(self) -> CommitNote:
        options, names = self._options, list(self._sizes)
        staged = self.folder if self._layout.folder else self.folder / names[-1]
        new, (old, old_files) = identity(staged) or 0, self._old()
        files = stamps(self.folder, names)
        return CommitNote(
            options.plan, options.source, self._layout.folder, new, old, old_files, files
        )

    def finish_earlier(self) -> bool:
        """Finish the commit in which an earlier run was killed.

        Return whether ``resume`` has nothing left to do: the output that it would write is in
        place.
        """
        note = self._note.read()
        if note is None:
            return False
        self._journals.require_ours()
        # after an exchange it is the old folder, which may be another user's
        if os.path.lexists(self.folder) and folder_identity(self.folder) in (None, note.new):
            require_own_folder(self.folder)
        first = Journal(self._journals.path(0))  # nobody else finishes it, or begins, meanwhile
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
            raise left_behind(self.path, error, self._options, done=done) from None
        finally:
            first.close()
        this_run = (self._options.plan, self._options.source)
        return done and self._options.resume and (note.plan, note.source) == this_run

    def _is_gone(self) -> bool:
        """Return whether the target was removed after it was put in place: nothing is left of it.

        A user may well remove the output of a killed run before the next one.
        """
        places = (self.path, aside_of(self.path))
        staged = is_real_folder(self.folder) and os.listdir(self.folder)
        return not staged and not any(map(os.path.lexists, places))

    # End

    def is_partial(self) -> bool:
        """Return whether there is something that another run continues."""
        is_ours = not self._role.finishes or self._journals.held
        return bool(is_ours and self._journals.find())

    def discard(self, names: Sequence[str]) -> None:
        """Remove what this process staged.

        If something else is in the folder of a whole output, all stays, and the next run says so.
        """
        with suppress(OSError, Unsupported):  # what led here is the error to tell
            if self._role.part is None:
                if is_real_folder(self.folder):
                    remove_staged(self.folder, self._sizes)
                self._forget()
            elif self._journal is not None and self._journal.is_open:
                remove_own(self.folder, names)
                self._journal.path.unlink()
                if not self._journals.find():
                    self.folder.rmdir()

    def _forget(self) -> None:
        """Remove all notes of this output, the commit's last."""
        self._journals.remove()
        self._note.remove()
        self.close()

    def close(self) -> None:
        """Let others write here."""
        self._journals.close()
