"""Put a staged file, and the side file that goes with it, at a target.

One file takes the place of another in one step. Of a pair the main file does: a side file that
stands beside the old one is renamed away before, the new one to its place after, so that no other
program ever finds one of each; ckptool, as long as the note is there, reads the one that belongs to
the main file that stands.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptool.errors import Committed
from ckptool.storage.commit_note import (
    _OLD_SIDE,
    CommitNote,
    NoteFile,
    _is_new,
    _unknown,
    side_name,
    stamp,
)
from ckptool.storage.disk import in_the_way, rename_new


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

        Unsupported where nothing is as it was noted.
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
