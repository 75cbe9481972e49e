"""Put staged output in place of what is at a target, and finish that after a kill.

A folder: at any moment either the old or the new one is there, complete. Both exchange their names
(``renameat2``) in one step. Where the file system lacks that, the old folder is renamed away first.
Then only the files of the old checkpoint are removed: all else in its folder is renamed into the
new one.

A file replaces another in one step. Of a file and its side file the main one does: an old side file
is renamed away before, and the new one into place after, so that no other program ever finds one of
each; while the note exists, ckptool reads the side file that belongs to the main file in place.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ckptool.core.text import list_some
from ckptool.engine.write.existing import (
    changed_files,
    keep_mode,
    keep_modes,
    move_kept,
    remove_own,
    stamps,
    stands_whole,
)
from ckptool.errors import Committed, TransferError, Unsupported
from ckptool.storage.commit_note import (
    OLD_SIDE,
    CommitNote,
    NoteFile,
    is_new_file,
    side_name,
    stamp,
    unknown_files,
)
from ckptool.storage.disk import (
    CANNOT_MOVE,
    exchange,
    folder_identity,
    identity,
    in_the_way,
    is_real_folder,
    rename_new,
    sync_folder,
)

_ASIDE = "for a moment neither the old nor the new one was in place"


def aside_of(target: Path) -> Path:
    """Return where the old folder goes temporarily if two cannot be exchanged."""
    return target.with_name(f".{target.name}.replaced")


class FolderCommit:
    """The commit of a folder: ``aside`` is where the old one goes if they cannot be exchanged."""

    def __init__(self, target: Path, staged: Path, note: NoteFile, *, fsync: bool) -> None:
        self._target = target
        self._staged = staged
        self._aside = aside_of(target)
        self._note = note
        self._fsync = fsync

    def replace(self, note: CommitNote) -> str | None:
        """Make the staged folder the target; return a remark if that took more than one step.

        Raises OSError or Unsupported if it fails: the old one is then unchanged.
        """
        self._note.write(note)
        if note.old is not None:
            keep_modes(self._target, self._staged, note.names)
        if note.old is None:
            rename_new(self._staged, self._target)
        elif not exchange(self._staged, self._target):
            return self._replace_in_steps()
        return None

    def is_done(self, note: CommitNote) -> bool:
        """Return whether the new folder is at the target, whatever is left of the old one."""
        return stands_whole(self._target, note.new, note.names)

    def roll(self, note: CommitNote) -> bool:
        """Continue after a kill; return whether the new one is now at the target.

        False if nothing was done yet. Raises Unsupported if the folders are not as noted.
        """
        if self.is_done(note):
            return True
        if not stands_whole(self._staged, note.new, note.names):
            raise self._unknown_state(note)
        if identity(self._target) is None and note.old is not None:
            # killed between two renames, unless the target was removed since
            if folder_identity(self._aside) != note.old:
                return False
            rename_new(self._staged, self._target)
            return True
        return False

    def clear(self, note: CommitNote) -> None:
        """Move foreign files of the old folder into the new one, and remove the old checkpoint.

        Raises Committed if something can be neither moved nor removed: it stays where it is.
        """
        for old in (self._staged, self._aside):
            if os.path.lexists(old):
                self._clear_old(old, note)

    def _clear_old(self, old: Path, note: CommitNote) -> None:
        if note.old is None or folder_identity(old) != note.old:
            raise Committed(
                f"{self._target}: the new one is in place, but {old} is not the old one that was"
                " recorded; nothing in it was removed",
                hint=f"check what it is, then move it away: mv {old} ELSEWHERE",
            )
        changed = changed_files(old, note.own)
        if changed:
            raise self._keep_error(old, changed, "which changed since")
        unmoved = move_kept(old, self._target, note.own)
        if unmoved:
            why = "which ckptool did not write, cannot be kept in it: the name is taken"
            raise self._keep_error(old, unmoved, why)
        if self._fsync:  # what was moved there must not be lost with the folder it comes from
            sync_folder(self._target)
        remove_own(old, note.own)
        old.rmdir()

    def _keep_error(self, old: Path, names: Collection[str], why: str) -> Committed:
        """Return the error for files that keep the rest of the old folder from being removed."""
        return Committed(
            f"{self._target}: the new one is in place, but {list_some(names)}, {why}, is still in"
            f" {old}; nothing of the old one was removed",
            hint="move it away; the next command that writes there removes the rest",
        )

    def _unknown_state(self, note: CommitNote) -> Unsupported:
        """Return the error for folders that are not as noted, as in a copy: what is where."""
        places = [
            f"{path} {self._describe(path, note)}"
            for path in (self._target, self._staged, self._aside)
            if path != self._aside or os.path.lexists(path)
        ]
        return Unsupported(
            f"{self._target}: an interrupted run was moving {self._staged} into place, and these"
            " are not the folders that it recorded (changed since, or copied):"
            f" {'; '.join(places)}; nothing was moved or removed",
            hint="finish it where it was copied from; or make sure that what you want stands at"
            f" {self._target}, move the others away, then rm {self._note.path}",
        )

    def _describe(self, path: Path, note: CommitNote) -> str:
        """Describe what is at a path, as far as its files show."""
        if not os.path.lexists(path):
            return "is not there"
        for what, files in (("new", note.names), ("old", note.own)):
            if files and stamps(path, files) == files:
                return f"has the files of the {what} one"
        names = sorted(os.listdir(path)) if is_real_folder(path) else []
        return f"holds {list_some(names)}" if names else "is something else"

    def _replace_in_steps(self) -> str:
        """Rename the old folder away and the new one into place; rename it back if that fails."""
        if os.path.lexists(self._aside):
            raise in_the_way(self._aside)
        try:
            os.rename(self._target, self._aside)
        except OSError as error:
            if error.errno not in CANNOT_MOVE:
                raise
            raise TransferError(
                f"{self._target}: cannot be renamed, and so not be replaced: it is in a lower layer"
                " of an overlay, or a file system is mounted there",
                hint=f"write elsewhere; or remove what is in it: rm -r {self._target}",
            ) from None
        try:
            rename_new(self._staged, self._target)
        except BaseException:
            self._put_old_back()
            raise
        return f"{self._target}: two folders cannot be exchanged in one step here: {_ASIDE}"

    def _put_old_back(self) -> None:
        try:
            os.rename(self._aside, self._target)
        except OSError as error:
            raise TransferError(
                f"{self._target}: neither the old nor the new one is in place now, and both are"
                f" complete: the old one is {self._aside}: {error.strerror}",
                hint="the same command with --overwrite puts a new one there; or put the old one"
                f" back: mv {self._aside} {self._target}",
            ) from error


class FileCommit:
    """The commit of one file, ``target``, and of the side file of the new one and the old one."""

    def __init__(self, target: Path, staged: Path, note: NoteFile, *, overwrite: bool) -> None:
        self._target = target
        self._staged = staged
        self._note = note
        self._overwrite = overwrite
        name = side_name(target.name)
        self._side = None if name is None else target.with_name(name)

    def replace(self, note: CommitNote) -> str | None:
        """Make the staged files the target's; on OSError the old ones are unchanged."""
        self._note.write(note)
        for name in note.names:
            keep_mode(self._target.with_name(name), self._staged / name)
        staged = self._staged / self._target.name
        try:
            if self._side is not None and os.path.lexists(self._side):
                os.rename(self._side, self._staged / OLD_SIDE)
            if self._overwrite:
                os.replace(staged, self._target)
            else:  # a file that came since must not be lost
                rename_new(staged, self._target)
        except BaseException:
            self._put_side(OLD_SIDE)
            raise
        return None

    def is_done(self, note: CommitNote) -> bool:
        """Return whether the new main file is at the target."""
        return is_new_file(self._target, self._target.name, note)

    def roll(self, note: CommitNote) -> bool:
        """Roll back after a kill, unless the new main file is already at the target.

        Raises Unsupported if the files are not as noted, or another side file is there.
        """
        if self.is_done(note):
            return True
        if not is_new_file(self._staged / self._target.name, self._target.name, note):
            raise unknown_files(self._target, self._staged)
        self._put_side(OLD_SIDE)
        return False

    def clear(self, note: CommitNote) -> None:
        """Put the new side file in place and remove the old one.

        Raises Committed for a staged file that was not noted, and Unsupported if another side file
        is there: everything then stays where it is.
        """
        if not os.path.lexists(self._staged):
            return
        self._require_known(note)
        if self._side is not None:
            self._put_side(self._side.name)
        (self._staged / OLD_SIDE).unlink(missing_ok=True)
        self._staged.rmdir()

    def _require_known(self, note: CommitNote) -> None:
        """Raise Committed if a file that was not noted would be removed or moved."""
        expected = (
            {}
            if self._side is None
            else {
                self._side.name: note.names.get(self._side.name),
                OLD_SIDE: note.own.get(self._side.name),
            }
        )
        for name in sorted(os.listdir(self._staged)):
            path = self._staged / name
            if name not in expected or stamp(path) != expected[name]:
                raise Committed(
                    f"{self._target}: the new one is in place, but {path} is not what was recorded;"
                    " nothing was removed",
                    hint=f"check what it is, then move it away: mv {path} ELSEWHERE",
                )

    def _put_side(self, name: str) -> None:
        """Put a staged side file in place; raise Unsupported if another one is there."""
        staged = self._staged / name
        if self._side is not None and os.path.lexists(staged):
            if os.path.lexists(self._side):
                raise in_the_way(self._side)
            rename_new(staged, self._side)


Commit = FolderCommit | FileCommit
