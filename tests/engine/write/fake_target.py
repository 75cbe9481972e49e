"""A target in memory, and any target that fails, dies or lies at one of its calls."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptool.core.layout import Layout
from ckptool.engine.checksum import crc32
from ckptool.engine.write.parts import PartState
from ckptool.engine.write.run import run
from ckptool.engine.write.schemas import JournalHead, PartEnd
from ckptool.engine.write.stage import WHOLE, StageOptions, Target
from ckptool.engine.write.work import Work
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.virtual.memory import MemoryFiles


@dataclass
class Shelf:
    """What outlives the processes that write: the target, what is staged, and the notes."""

    scratch: Path
    there: dict[str, bytes] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    staged: dict[str, bytes] = field(default_factory=dict)
    notes: dict[int, PartState] = field(default_factory=dict)


class FakeTarget(Target):
    """The shortest target that keeps its promises: each call is done at once, or not at all."""

    def __init__(self, shelf: Shelf, layout: Layout, options: StageOptions) -> None:
        self.path = shelf.scratch / "target"
        self._shelf = shelf
        self._sizes = {file.path: file.nbytes for file in layout.files}
        self._options = options
        self._role = options.role
        self._published = False

    @property
    def _number(self) -> int:
        return 0 if self._role.part is None else self._role.part.position

    def require_possible(self) -> None:
        shelf, options = self._shelf, self._options
        if shelf.there and not options.overwrite:
            raise Unsupported(f"{self.path} already exists")
        if self._role == WHOLE and options.resume and not shelf.notes:
            raise Unsupported(f"{self.path}: there is no partial output to resume")

    def claim(self) -> None:
        notes, options, part = self._shelf.notes, self._options, self._role.part
        if self._role.finishes:
            return
        if not options.resume:
            self._shelf.staged.clear()
            notes.clear()
        self.is_new = self._number not in notes
        head = JournalHead(options.plan, options.source, None if part is None else part.size)
        notes[self._number] = PartState(head, None)

    def join(self, rank: int) -> None:
        """There are no other ranks."""

    def write(self, work: Work) -> None:
        folder = self._shelf.scratch / "scratch"
        run(work, folder)
        for number in work.numbers:
            name = work.plan.layout.files[number].path
            self._shelf.staged[name] = (folder / name).read_bytes()

    @property
    def written(self) -> MemoryFiles:
        staged = self._shelf.staged
        return MemoryFiles({name: memoryview(staged.get(name, b"")) for name in self._sizes})

    def parts(self) -> dict[int, PartState]:
        return self._shelf.notes

    def marks(self, names: Iterable[str]) -> dict[str, Any]:
        staged = self._shelf.staged
        return {
            name: (len(staged[name]), crc32(staged[name]), 0) for name in names if name in staged
        }

    def seal(self, names: Sequence[str]) -> dict[str, Any]:
        self._require_whole(names)
        return self.marks(names)

    def _require_whole(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._shelf.staged.get(name, b"")) != self._sizes[name]:
                raise TransferError(f"{name}: cut short after it was written")

    def end_part(self, end: PartEnd[Any]) -> None:
        notes, number = self._shelf.notes, self._number
        if number not in notes:
            raise TransferError(f"part {number + 1}: its note is gone")
        notes[number] = PartState(notes[number].head, end)

    def publish(self) -> None:
        self._require_whole(self._sizes)
        shelf = self._shelf
        kept = {name: data for name, data in shelf.there.items() if name not in shelf.own}
        shelf.there, shelf.own = kept | shelf.staged, frozenset(shelf.staged)
        shelf.staged = {}
        shelf.notes.clear()
        self._published = True

    def is_published(self) -> bool:
        return self._published

    def is_partial(self) -> bool:
        return bool(self._shelf.notes)

    def discard(self, names: Sequence[str]) -> None:
        for name in names:
            self._shelf.staged.pop(name, None)
        self._shelf.notes.pop(self._number, None)


class Died(BaseException):
    """The end of a process: nothing of it runs on."""


LIES: dict[str, Any] = {
    "finish_earlier": False,
    "is_marked": True,
    "is_published": False,
    "is_partial": True,
    "parts": {},
    "marks": {},
    "seal": {},
}
"""What a call returns that does nothing; all others return None. What is read back is no lie."""
HONEST = ("written", "join")
"""Calls that do nothing which a lie could leave out."""
FAULTS = ("fails", "fails late", "dies", "dies late", "lies")


class Faults:
    """The calls of a target by their numbers from 1 on, of which some meet a fault."""

    def __init__(self, at: dict[int, str] | None = None) -> None:
        self.calls: list[str] = []
        self._at = at or {}

    def befall(self, name: str, real: Any, *words: Any) -> Any:
        """Do a call, unless its fault keeps it from being done."""
        self.calls.append(name)
        fault = self._at.get(len(self.calls), "")
        if fault == "lies" and name not in HONEST:
            return LIES.get(name)
        answer = real(*words) if fault.endswith("late") or fault in ("", "lies") else None
        if fault.startswith("fails"):
            raise OSError(errno.EIO, f"{name} {fault}")
        if fault.startswith("dies"):
            raise Died(name)
        return answer


class FaultyTarget:
    """A target whose calls may meet a fault; attributes are told as they are."""

    def __init__(self, real: Target, faults: Faults) -> None:
        self._real = real
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        if name == "written":
            return self._faults.befall(name, lambda: self._real.written)
        found = getattr(self._real, name)
        if not callable(found):
            return found
        return lambda *words: self._faults.befall(name, found, *words)
