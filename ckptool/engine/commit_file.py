"""Put a staged file, and the side file that goes with it, at a target.

One file takes the place of another in one step. Of a pair the main file does: a side file that
stands beside the old one is renamed away before, the new one to its place after, so that no other
program ever finds one of each; ckptool, as long as the note is there, reads the one that belongs to
the main file that stands.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckptool.engine.commit import CommitNote, NoteFile
from ckptool.engine.disk import identity, in_the_way, rename_new
from ckptool.engine.known import stamp
from ckptool.errors import CannotDo, Committed

_OLD_SIDE = ".replaced"


def side_name(name: str) -> str | None:
    """What the file beside a safetensors file is called that holds what it cannot."""
    if not name.endswith(".safetensors"):
        return None
    return f"{name.removesuffix('.safetensors')}.extra.pt"


def staging_folder(target: Path) -> Path:
    """Where the output for a target is written until it is whole."""
    return target.with_name(f".{target.name}.partial")


def note_path(target: Path) -> Path:
    """Where a run notes what it is about to replace."""
    return target.with_name(f"{staging_folder(target).name}.journal.commit")


def side_file(path: Path) -> Path | None:
    """The file that goes with a safetensors file, None where it has none.

    In the middle of a commit, or of one that was killed, it is not in its place. CannotDo where it
    cannot be told which one goes with the file.
    """
    name = side_name(path.name)
    if name is None:
        return None
    side = path.with_name(name)
    if os.path.lexists(note_path(path)):
        side = _side_in_commit(path, side)
    return side if side.is_file() else None


def _side_in_commit(path: Path, side: Path) -> Path:
    note = None
    with suppress(OSError, CannotDo):
        note = NoteFile(note_path(path), fsync=False).read()
    if note is None:
        return side
    folder = staging_folder(path)
    if _is_new(path, path.name, note):
        name = side.name
    elif _is_new(folder / path.name, path.name, note):
        name = _OLD_SIDE
    else:
        raise _unknown(path, folder)
    return folder / name if (folder / name).is_file() else side


def _is_new(path: Path, name: str, note: CommitNote) -> bool:
    """Whether the new main file stands at a path, as it was noted."""
    return identity(path) == note.new and stamp(path) == note.names.get(name)


def _unknown(target: Path, staged: Path) -> CannotDo:
    """The error where neither place has the file that was noted, as in a copy of both."""
    return CannotDo(
        f"{target}: a run was cut short while it put a file of {staged} there, and neither the one"
        " that stands there nor one in that folder is the file it noted: changed since, or copied;"
        f" so it cannot be told whether the side file that goes with {target.name} is the one"
        " beside it or one in that folder",
        hint=f"use the place that it was copied from; or keep the whole pair, move {staged} away,"
        f" then rm {note_path(target)}",
    )


class FileCommit:
    """The commit of one file, ``target``, and of the side file that belongs to it or to the old."""

    def __init__(self, target: Path, staged: Path, note: NoteFile, *, overwrite: bool) -> None:
        self._target = target
        self._staged = staged
        self._note = note
        self._overwrite = overwrite
        name = side_name(target.name)
        self._side = None if name is None else target.with_name(name)

    def replace(self, note: CommitNote) -> str | None:
        """Make the staged files the target's. OSError where it fails: then the old ones stand."""
        self._note.write(note)
        try:
            self._put_side_away()
            self._put_main()
        except BaseException:
            self._put_side_back()
            raise
        return None

    def is_done(self, note: CommitNote) -> bool:
        """Whether the new main file stands at the target."""
        return _is_new(self._target, self._target.name, note)

    def roll(self, note: CommitNote) -> bool:
        """Go back after a kill, unless the new main file stands at the target already.

        CannotDo where nothing is as it was noted.
        """
        if self.is_done(note):
            return True
        if not _is_new(self._staged / self._target.name, self._target.name, note):
            raise _unknown(self._target, self._staged)
        self._put_side_back()
        return False

    def clear(self, note: CommitNote) -> None:
        """Put the new side file in its place and remove the old one.

        Committed where something else lies there: all stays where it is.
        """
        if not os.path.lexists(self._staged):
            return
        self._require_known(note)
        if self._side is not None:
            staged = self._staged / self._side.name
            if os.path.lexists(staged):
                rename_new(staged, self._side)
        (self._staged / _OLD_SIDE).unlink(missing_ok=True)
        self._staged.rmdir()

    def _require_known(self, note: CommitNote) -> None:
        """Committed where a file that is not the one noted would be removed or put in place."""
        known = (
            {}
            if self._side is None
            else {
                self._side.name: note.names.get(self._side.name),
                _OLD_SIDE: note.own.get(self._side.name),
            }
        )
        for name in sorted(os.listdir(self._staged)):
            path = self._staged / name
            if name not in known or stamp(path) != known[name]:
                raise Committed(
                    f"{self._target}: the new one stands, but {path} is not what was noted:"
                    " nothing is removed",
                    hint=f"look what it is, and move it away: mv {path} ELSEWHERE",
                )
        side = self._side
        if side is not None and os.path.lexists(self._staged / side.name) and os.path.lexists(side):
            raise in_the_way(side)

    def _put_main(self) -> None:
        staged = self._staged / self._target.name
        if self._overwrite:
            os.replace(staged, self._target)
        else:
            rename_new(staged, self._target)

    def _put_side_away(self) -> None:
        if self._side is not None and os.path.lexists(self._side):
            os.rename(self._side, self._staged / _OLD_SIDE)

    def _put_side_back(self) -> None:
        away = self._staged / _OLD_SIDE
        if self._side is not None and os.path.lexists(away):
            rename_new(away, self._side)
