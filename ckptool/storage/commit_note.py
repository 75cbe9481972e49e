"""The note of a run that writes or replaces a target, and which side file goes with it.

An interrupted run leaves the note: a later one finishes by it, and a reader finds by it the side
file that belongs to the safetensors file in place.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptool.errors import Damaged, Problem, Unsupported
from ckptool.storage.disk import identity, is_real_file, is_real_folder, sync_folder
from ckptool.storage.file_status import is_file_there
from ckptool.storage.note import (
    Size,
    Text,
    Time,
    dump_note,
    not_a_note,
    open_note,
    parse_note,
    read_note,
    require_plain,
)

if TYPE_CHECKING:
    from ckptool.storage.files import Files

Stamp = tuple[Size, Time]
"""The size of a file and the time of its last change, in nanoseconds."""

_SCHEMA = "ckptool.commit/3"
_MARK = f'{{"schema": "{_SCHEMA}"'.encode()
UNFINISHED = ".ckptool-unfinished.json"
"""The note in a folder of a store from the first byte until everything is written."""


class CommitNote(Struct, frozen=True, forbid_unknown_fields=True, tag_field="schema", tag=_SCHEMA):
    """What a commit of a ``folder`` or of a single file is about to do.

    ``new`` and ``old`` are the inodes of what is staged and of what is at the target, ``own`` the
    files of the old checkpoint, which go, and ``names`` the new ones, the one that commits last,
    each with its size and time.
    """

    plan: Text
    source: Text
    folder: bool
    new: Size
    old: Size | None
    own: dict[str, Stamp]
    names: dict[str, Stamp]

    def __post_init__(self) -> None:
        require_plain([*self.own, *self.names])


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class NoteFile:
    """The note of one target's commit, as a file beside the staged files."""

    def __init__(self, target: Path, *, fsync: bool) -> None:
        self.path = note_path(target)
        self._target = target
        self._fsync = fsync

    def read(self, *, owner: int | None = None) -> CommitNote | None:
        """Read the note of an interrupted run, or return None if there is none.

        Raises Unsupported if it is not this user's, or that of a known ``owner``, or says more
        than such a note may.
        """
        try:
            data = read_note(self.path, owner=owner)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise
        if not data:
            return None
        note = parse_note(data, CommitNote, self.path)
        own_names = {self._target.name, side_name(self._target.name)}
        strangers = {*note.own, *note.names} - own_names
        if strangers and not note.folder:
            raise not_a_note(self.path, f"it speaks of other files than {self._target.name}")
        return note

    def write(self, note: CommitNote) -> None:
        """Write the note so that it survives a power failure."""
        self._remove_part()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(open_note(self._part, flags), "wb") as file:
            file.write(dump_note(note))
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        os.replace(self._part, self.path)
        if self._fsync:
            sync_folder(self.path.parent)

    def remove(self) -> None:
        """Remove the note: nothing is left to be done."""
        self._remove_part()
        self.path.unlink(missing_ok=True)

    def _remove_part(self) -> None:
        """Remove a note of which the writing was interrupted; Unsupported for another file."""
        with suppress(FileNotFoundError):
            read_note(self._part, mark=_MARK)
            self._part.unlink()

    @property
    def _part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.new")


OLD_SIDE = ".replaced"


def side_name(name: str) -> str | None:
    """Return the name of the file beside a safetensors file for everything it cannot hold."""
    if not name.endswith(".safetensors"):
        return None
    return f"{name.removesuffix('.safetensors')}.extra.pt"


def staging_folder(target: Path) -> Path:
    """Return where the output for a target is written until it is complete."""
    return target.with_name(f".{target.name}.partial")


def note_path(target: Path) -> Path:
    """Return where a run notes what it is about to replace."""
    return target.with_name(f"{staging_folder(target).name}.journal.commit")


def targets_with_notes(folder: Path) -> list[Path]:
    """Return the places in a folder that an interrupted run was about to replace."""
    head, tail = note_path(folder / "*").name.split("*")
    candidates = (path.name for path in folder.iterdir() if len(path.name) > len(head + tail))
    noted = (name for name in candidates if name.startswith(head) and name.endswith(tail))
    names = {name[len(head) : -len(tail)] for name in noted} - {".", ".."}
    return sorted(folder / name for name in names)


def side_file(path: Path) -> Path | None:
    """Return the file that goes with a safetensors file, None if it has none.

    During a commit, or after a killed one, it is in another place. Raises Unsupported if it is
    unclear which one goes with the file.
    """
    name = side_name(path.name)
    if name is None:
        return None
    side = path.with_name(name)
    if os.path.lexists(note_path(path)):
        side = _side_in_commit(path, side)
    return side if is_file_there(side) else None


def _side_in_commit(path: Path, side: Path) -> Path:
    """Return which side file goes with a file; the note is this user's, or that of its owner."""
    owner = os.lstat(path).st_uid
    note = NoteFile(path, fsync=False).read(owner=owner)
    if note is None:
        return side
    folder = staging_folder(path)
    if is_new_file(path, path.name, note):
        name = side.name
    elif is_new_file(folder / path.name, path.name, note):
        name = OLD_SIDE
    else:
        raise unknown_files(path, folder)
    is_there = is_real_folder(folder) and is_real_file(folder / name)
    return folder / name if is_there else side


def is_new_file(path: Path, name: str, note: CommitNote) -> bool:
    """Return whether the new main file is at a path, as noted."""
    return identity(path) == note.new and stamp(path) == note.names.get(name)


def unknown_files(target: Path, staged: Path) -> Unsupported:
    """Return the error if neither place has the file that was noted, as in a copy of both."""
    return Unsupported(
        f"{target}: an interrupted run was moving a file of {staged} there, and neither that file"
        " nor one in the folder is the one it recorded (changed since, or copied); it is unclear"
        f" which side file goes with {target.name}: the one beside it or one in the folder",
        hint=f"use the place that it was copied from; or keep the whole pair, move {staged} away,"
        f" then rm {note_path(target)}",
    )


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of what is at a path, None if nothing is; follows no link."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns


def unfinished_problem(source: Files) -> Problem | None:
    """Return the problem of a folder that ckptool is writing, or left unfinished."""
    if UNFINISHED not in source.files:
        return None
    message = f"{source.root}: unfinished ckptool output (contains {UNFINISHED})"
    return Problem(message, "save-incomplete", file=UNFINISHED)


def require_finished(source: Files) -> None:
    """Raise Damaged if ckptool has not finished writing a folder."""
    problem = unfinished_problem(source)
    if problem is not None:
        hint = (
            "if no ckptool command is writing it, run the same command with --resume, in place of"
            " --overwrite if it had that"
        )
        raise Damaged(problem, hint=hint)
