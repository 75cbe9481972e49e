"""What a run notes before it replaces a target, so that a later one finishes what was cut short."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ckptool.engine.disk import in_the_way, is_real_file, open_unfollowed, sync_folder
from ckptool.engine.known import Stamp

_SCHEMA = "ckptool.commit/2"


@dataclass(frozen=True, slots=True)
class CommitNote:
    """What a commit of a ``folder`` or of a single file is about to do.

    ``new`` and ``old`` are the inodes of what is staged and of what stands at the target, ``own``
    the files of the old checkpoint, which go, and ``names`` those that come, the one that commits
    last, each with its size and time. ``by_files`` says that the files take their places one by
    one.
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
        """The same commit, file by file."""
        return replace(self, by_files=True)


class Commit(Protocol):
    """How what is staged takes its place at a target, in steps that another run can go on with."""

    def replace(self, note: CommitNote) -> str | None:
        """Make what is staged the target; a remark where that was not one step.

        OSError or CannotDo where it fails: then the old one stands as it did.
        """

    def is_done(self, note: CommitNote) -> bool:
        """Whether the new one stands at the target, whatever is left of the old one."""

    def roll(self, note: CommitNote) -> bool:
        """Go on after a kill, or back; whether the new one now stands at the target."""

    def clear(self, note: CommitNote) -> None:
        """Remove what is left of the old one, and nothing else."""


class NoteFile:
    """The note of one target's commit, as a file beside the staged files."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync

    def read(self) -> CommitNote | None:
        """What a run noted that was cut short; None where none was. CannotDo for another's file."""
        if not os.path.lexists(self.path):
            return None
        if not is_real_file(self.path):
            raise in_the_way(self.path)
        data = self.path.read_bytes()
        note = _parsed(data)
        if note is None and data:
            raise in_the_way(self.path)
        return note

    def write(self, note: CommitNote) -> None:
        """Write the note so that it outlives a loss of power."""
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
        """Nothing is left to be done."""
        self._part.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @property
    def _part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.new")


def _parsed(data: bytes) -> CommitNote | None:
    try:
        value: Any = json.loads(data)
        if value.pop("schema", None) != _SCHEMA:
            return None
        files = {key: _stamped(value[key]) for key in ("own", "names")}
        return CommitNote(**value | files)
    except (ValueError, AttributeError, TypeError, KeyError):
        return None


def _stamped(files: dict[str, list[int]]) -> dict[str, Stamp]:
    return {name: (size, time) for name, (size, time) in files.items()}
