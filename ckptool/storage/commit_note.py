"""The note of a run that writes or replaces a target, and which side file goes with it.

An interrupted run leaves the note: a later one finishes by it, and a reader finds by it the side
file that belongs to the safetensors file in place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from ckptool.errors import Unsupported
from ckptool.storage.disk import identity, in_the_way, is_real_file, open_unfollowed, sync_folder

_SCHEMA = "ckptool.commit/2"

UNFINISHED = ".ckptool-unfinished.json"
"""The note in a folder of a store from the first byte until everything is written."""


class CommitNote(Struct, frozen=True):
    """What a commit of a ``folder`` or of a single file is about to do.

    ``new`` and ``old`` are the inodes of what is staged and of what is at the target, ``own`` the
    files of the old checkpoint, which go, and ``names`` the new ones, the one that commits last,
    each with its size and time. ``by_files`` means that the files are moved one by one.
    """

    plan: str
    source: str
    folder: bool
    new: int
    old: int | None
    own: Mapping[str, Stamp]
    names: Mapping[str, Stamp]
    by_files: bool = False

    def by_single_files(self) -> CommitNote:
        """Return the same commit, file by file."""
        return replace(self, by_files=True)


class NoteFile:
    """The note of one target's commit, as a file beside the staged files."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync

    def read(self) -> CommitNote | None:
        """Read the note of an interrupted run, or return None; Unsupported for another's file."""
        if not os.path.lexists(self.path):
            return None
        if not is_real_file(self.path):
            raise in_the_way(self.path)
        data = self.path.read_bytes()
        note = _parse(data)
        if note is None and data:
            raise in_the_way(self.path)
        return note

    def write(self, note: CommitNote) -> None:
        """Write the note so that it survives a power failure."""
        data = json.dumps({"schema": _SCHEMA} | asdict(note)).encode()
        with open(open_unfollowed(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        os.replace(self._part, self.path)
        if self._fsync:
            sync_folder(self.path.parent)

    def remove(self) -> None:
        """Remove the note: nothing is left to be done."""
        self._part.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @property
    def _part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.new")


def _parse(data: bytes) -> CommitNote | None:
    try:
        value: Any = json.loads(data)
        if value.pop("schema", None) != _SCHEMA:
            return None
        files = {key: _parse_stamps(value[key]) for key in ("own", "names")}
        return CommitNote(**value | files)
    except (ValueError, AttributeError, TypeError, KeyError):
        return None


def _parse_stamps(files: dict[str, list[int]]) -> dict[str, Stamp]:
    return {name: (size, time) for name, (size, time) in files.items()}


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
    found = (path.name for path in folder.iterdir())
    names = (n for n in found if n.startswith(head) and n.endswith(tail))
    return sorted(folder / name.removeprefix(head).removesuffix(tail) for name in names)


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
    return side if side.is_file() else None


def _side_in_commit(path: Path, side: Path) -> Path:
    note = None
    with suppress(OSError, Unsupported):
        note = NoteFile(note_path(path), fsync=False).read()
    if note is None:
        return side
    folder = staging_folder(path)
    if is_new_file(path, path.name, note):
        name = side.name
    elif is_new_file(folder / path.name, path.name, note):
        name = OLD_SIDE
    else:
        raise unknown_files(path, folder)
    return folder / name if (folder / name).is_file() else side


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


Stamp = tuple[int, int]
"""The size of a file and the time of its last change, in nanoseconds."""


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of what is at a path, None if nothing is; follows no link."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns
