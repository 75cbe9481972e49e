"""Output appears completely or not at all: claimed, written, proven, then committed.

A ``Stage`` is the one way through these states, a ``Role`` what one process has to do on it, and a
``Target`` how that is done on a disk or in a store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from msgspec import Struct

from ckptool.core.layout import Layout
from ckptool.engine.share import Share
from ckptool.engine.write.parts import (
    PartState,
    damaged_part,
    require_joined,
    require_parts,
)
from ckptool.engine.write.schemas import NotedRecord, PartEnd
from ckptool.engine.write.work import Work
from ckptool.storage.files import Files
from ckptool.storage.url import Location

RESUME_HINT = "the finished files are kept; the same command with --resume continues"
RESUME_OVERWRITE = RESUME_HINT.replace("--resume", "--resume in place of --overwrite")


class Role(Struct, frozen=True):
    """The share of an output that one process makes: all, alone or with other ranks, or a part.

    Of a run in parts it writes one ``part``, or ``finishes`` what the parts wrote. ``next_step``
    says how a run that ends midway is continued.
    """

    next_step: str
    part: Share | None = None
    finishes: bool = False


WHOLE = Role(RESUME_HINT)
FINISH = Role("what the parts wrote is kept; the same command commits it", finishes=True)


def part_role(share: Share) -> Role:
    """Return the role of a process that writes one part."""
    return Role("the finished files are kept; the same command continues", part=share)


class StageOptions(Struct, frozen=True, dict=True):
    """``overwrite`` replaces an existing target; ``resume`` continues a partial output.

    ``plan`` and ``source`` are digests that a resumed run must share with the first, and the parts
    of a run also ``source_state``; ``verify`` means that output is compared with the source before
    it counts; ``find_own`` returns the files of the checkpoint at the target, or None. ``role`` is
    what this process does of the output.
    """

    plan: str
    source: str
    source_state: str = ""
    overwrite: bool = False
    resume: bool = False
    fsync: bool = True
    verify: bool = True
    find_own: Callable[[], Collection[str] | None] = lambda: None
    role: Role = WHOLE

    @cached_property
    def own(self) -> Collection[str] | None:
        """The files of the checkpoint at the target, once one is known to be there."""
        return self.find_own()


class Target(Protocol):
    """A place on a disk or in a store, and what is noted beside the output that is made there.

    Other processes see the notes: they keep away, continue, or finish. What exists must belong to
    ckptool before it is used, and is otherwise refused with Unsupported.
    """

    path: Location
    """Where the output will be."""
    is_new: bool = False
    """Whether this process began the output, or its part of it."""
    marker: int | None = None
    """The file of the layout that makes a checkpoint of the others, if there is no rename."""
    last_files: tuple[int, ...] = ()
    """The marker, if it can be written last of all: it holds no tensors."""
    finds_changes: bool = False
    """Whether ``claim`` refuses what has come or changed since ``require_possible``."""

    def finish_earlier(self) -> bool:
        """Finish the commit of a killed run; return whether ``resume`` has nothing left to do."""
        return False

    def require_possible(self) -> None:
        """Raise Unsupported if the target is taken, does not fit, or nothing can be continued."""

    def hold_parts(self) -> None:
        """Keep all parts from writing on; Unsupported if one is being written."""
        return

    def claim(self) -> None:
        """Note who writes, or continue from such a note; remove what is to be replaced first."""

    def join(self, rank: int) -> None:
        """Continue what was claimed as this rank, maybe in another process."""

    def mark(self, token: str) -> None:
        """Leave a mark that is visible to all processes that write into the same place."""
        return

    def is_marked(self, token: str) -> bool:
        """Return whether the mark is visible here; True if no process may be elsewhere."""
        return True

    def write(self, work: Work) -> None:
        """Write files of the plan, but for those that an earlier run finished."""

    @property
    def written(self) -> Files:
        """The files that were written, to be read back."""

    def parts(self) -> Mapping[int, PartState]:
        """Return the notes of the parts that there are, by their numbers from 0 on."""

    def marks(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Return a record of those files that are there, which shows if they were changed."""

    def seal(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the marks of written files, once they are safe; TransferError if one is lost."""

    def end_part(self, end: PartEnd[Any]) -> None:
        """Note that the part is done."""

    def publish(self) -> str | None:
        """Put the output in place; return a remark if that took more than one step.

        An error before that leaves the old one as it was; one after it is Committed.
        """

    def is_published(self) -> bool:
        """Return whether the output is in place, whatever is left to be cleaned up."""

    def is_partial(self) -> bool:
        """Return whether there is something that another run continues."""

    def discard(self, names: Sequence[str]) -> None:
        """Remove those files that this process wrote, with its notes, and nothing else."""

    def remains(self) -> str | None:
        """Return what could not be removed and costs storage from now on; None if nothing."""
        return None

    def close(self) -> None:
        """Let others write here."""
        return


class Stage:
    """The output of one run, as one process makes its share of it.

    One process begins it, others that write into it ``join`` its target. ``noted`` is what parts
    or ranks read of records that none of them reads whole.
    """

    def __init__(self, target: Target, layout: Layout, options: StageOptions) -> None:
        self.target = target
        self.options = options
        self._role = role = options.role
        self._names = [*layout.sizes] if role.part is None else []
        self._files = layout.files
        self.noted: list[NotedRecord] = []
        self._is_possible = False

    def require_possible(self) -> None:
        """Raise Unsupported if the target is not free, does not fit, or a part is not done."""
        self.target.require_possible()
        if self._role.finishes:
            self._require_parts()
        self._is_possible = True

    def _require_parts(self) -> None:
        """Raise Unsupported if a part is not done, or its files are not as it left them."""
        target, marker = self.target.path, self.target.marker
        written = [file.path for number, file in enumerate(self._files) if number != marker]
        ended = require_parts(target, self.target.parts(), self.options, written)
        self.noted = [note for end in ended for note in end.joined]
        for number, end in enumerate(ended):
            now = self.target.marks(end.files)
            changed = [name for name, mark in end.files.items() if now.get(name) != mark]
            if changed:
                raise damaged_part(target, number, len(ended), changed)

    def begin(self) -> None:
        """Claim the output, or with ``resume`` take over an earlier run's.

        Raises Unsupported if the target exists, does not fit, or there is nothing to resume.
        """
        self.target.finish_earlier()
        if self._role.finishes:  # before their notes are read: none may change after that
            self.target.hold_parts()
        # a store looks again as it claims, and each look is a request
        if not (self._is_possible and self.target.finds_changes):
            self.require_possible()
        self.target.claim()

    def takes(self, numbers: Iterable[int]) -> list[int]:
        """Return the files of a share that this process writes before the commit, by number.

        A marker is no part's: whoever finishes writes it, before the commit if it holds tensors.
        """
        marker, role = self.target.marker, self._role
        if role.finishes:
            return [] if marker is None or self.target.last_files else [marker]
        last_files = self.target.last_files if role.part is None else (marker,)
        own_numbers = [number for number in numbers if number not in last_files]
        if role.part is not None:
            self._names = [self._files[number].path for number in own_numbers]
        return own_numbers

    def require_joined(self, source: Files, workers: int) -> None:
        """Check the records of which each part or rank read a run; Damaged if one differs."""
        require_joined(self.noted, source, workers)

    def commit(self) -> str | None:
        """Put the output in place, or note that a part is done; return a remark, if any."""
        if self._role.part is None:
            return self.target.publish()
        marks, options = self.target.seal(self._names), self.options
        self.target.end_part(PartEnd(options.verify, options.source_state, marks, self.noted))
        return None

    def is_committed(self) -> bool:
        """Return whether the output is in place, whatever is left to be cleaned up."""
        return self._role.part is None and self.target.is_published()

    def next_step(self) -> str | None:
        """Return how to continue a run that ended midway; None if there is nothing to continue."""
        if not self.target.is_partial():
            return None
        is_whole = self._role == WHOLE and self.options.overwrite
        return RESUME_OVERWRITE if is_whole else self._role.next_step

    def discard(self, *, resumed: bool = False) -> None:
        """Remove what this process wrote; what was resumed only if requested.

        What the parts wrote stays if they cannot be finished.
        """
        if not self._role.finishes and (self.target.is_new or resumed):
            self.target.discard(self._names)
        self.target.close()
