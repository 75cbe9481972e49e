"""What the pickles of a checkpoint name, and whether their values are a trap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.errors import Problem
from ckptool.serialization.pickle.globals import can_run_code, is_harmless, is_known
from ckptool.serialization.pickle.load import find_globals
from ckptool.serialization.pickle.records import Call, Global, Names
from ckptool.serialization.state_dict.values import Expansion, list_parts

_SMALL = 4096


class PickleAudit:
    """Follows pickles without running them; ``problems`` name what does not belong in one.

    A class or function is reported once per file, at its first occurrence.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._reported: set[tuple[str, Global]] = set()
        self._find_in_small = cache(find_globals)  # there may be thousands alike

    def look_at(self, data: bytes, file: str, offset: int | None, *, pickles: int = 1) -> bool:
        """Check so many ``pickles`` in a row; return whether all that they name belongs there.

        They begin at ``offset`` of the file, None if they are compressed.
        """
        is_small = len(data) <= _SMALL and pickles == 1
        names = self._find_in_small(data) if is_small else find_globals(data, pickles=pickles)
        return self.note(names, file, offset)

    def note(self, names: Names, file: str, offset: int | None) -> bool:
        """Check the names found in a pickle, as ``look_at`` does."""
        belongs = True
        for item, at in names.items():
            hostile = can_run_code(item) and item.name != "getattr"
            if not hostile and is_known(item):
                continue
            belongs = False
            if (file, item) not in self._reported:
                self._reported.add((file, item))
                self.problems.append(
                    _problem(
                        item, file, offset, at, hostile=hostile, is_record=item in names.records
                    )
                )
        return belongs


def _problem(
    item: Global, file: str, offset: int | None, at: int, *, hostile: bool, is_record: bool
) -> Problem:
    place = f"at byte {at:,} of its compressed pickle"
    if offset is not None:
        place = f"at byte {offset + at:,}"
    code, meaning = "unknown-callable", "is not known to be harmless; nothing was called"
    if hostile:
        code, meaning = "hostile-global", "can run code; nothing was called"
    elif is_record or is_harmless(item):
        code, meaning = "unknown-global", "is not part of a plain checkpoint"
    return Problem(f"{file}: pickle {place} names {item}, which {meaning}", code, file=file)


_DEEPEST = 100


def odd_values(objects: Iterable[ObjectEntry]) -> Iterator[Problem]:
    """Yield values that expand to far more than their size, or would call a non-function."""
    audit = _ValueAudit()
    for entry in objects:
        for code, reason in audit.oddities(entry.value):
            yield Problem(f"{entry.name}: {reason}", code, tensor=entry.name)


class _ValueAudit:
    """A check of values that visits each part once, however often it is referenced."""

    def __init__(self) -> None:
        self._expansion = Expansion()
        self._done: set[int] = set()
        self._open: set[int] = set()
        self._deepest = 0
        self._endless = self._computed = False

    def oddities(self, value: Any) -> Iterator[tuple[str, str]]:
        """Yield the codes that apply to a value, and why."""
        self._deepest, self._endless, self._computed = 0, False, False
        size = self._expansion.parts(value)
        self._descend(value)
        if self._endless:
            yield "pickle-bomb", "a value that contains itself"
        elif self._deepest > _DEEPEST or not self._expansion.is_bounded(size):
            levels = f"a value of {self._deepest:,} levels"
            yield "pickle-bomb", f"{levels} that unfolds to {size:,} parts"
        if self._computed:
            yield "value-suspicious", "a record that would call what is not a class or function"

    def _descend(self, value: Any) -> None:
        """Visit each part that no earlier value contained."""
        stack: list[tuple[Any, bool]] = [(value, False)]
        while stack:
            item, is_left = stack.pop()
            if is_left:
                self._open.discard(id(item))
            elif id(item) not in self._done:
                self._done.add(id(item))
                self._open.add(id(item))
                self._deepest = max(self._deepest, len(self._open))
                self._computed |= isinstance(item, Call) and not isinstance(item.function, Global)
                stack.append((item, True))
                stack += [(part, False) for part in list_parts(item) if self._is_new(part)]

    def _is_new(self, part: Any) -> bool:
        if id(part) in self._open and not isinstance(part, Call):
            self._endless |= isinstance(part, list | dict | tuple | set)
        return id(part) not in self._done
