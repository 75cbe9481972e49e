"""Whether the values beside the tensors are what a checkpoint holds, or a trap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.errors import Problem
from ckptool.formats._pickle import Call, Global
from ckptool.formats._unfolding import Unfolding, inner_parts

_DEEPEST = 100


def odd_values(objects: Iterable[ObjectEntry]) -> list[Problem]:
    """Values that unfold to far more than they are, or that would call what is no function."""
    problems = []
    walk = _Walk()
    for entry in objects:
        for code, reason in dict(walk.oddities(entry.value)).items():
            problems.append(Problem(f"{entry.name}: {reason}", code, tensor=entry.name))
    return problems


class _Walk:
    """One look at values, each part of them once, however often it is referred to."""

    def __init__(self) -> None:
        self._unfolding = Unfolding()
        self._done: set[int] = set()
        self._open: set[int] = set()
        self._deepest = 0
        self._endless = self._computed = False

    def oddities(self, value: Any) -> Iterator[tuple[str, str]]:
        """The codes that a value deserves, and why."""
        self._deepest, self._endless, self._computed = 0, False, False
        size = self._unfolding.parts(value)
        self._descend(value)
        if self._endless:
            yield "pickle-bomb", "a value that holds itself"
        elif self._deepest > _DEEPEST or not self._unfolding.is_bounded(size):
            yield (
                "pickle-bomb",
                f"a value of {self._deepest:,} levels that unfolds to {size:,} parts",
            )
        if self._computed:
            yield "value-odd", "a record that would call what is no class or function"

    def _descend(self, value: Any) -> None:
        """Go down to each part that no value before has had."""
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
                stack += [(part, False) for part in inner_parts(item) if self._is_new(part)]

    def _is_new(self, part: Any) -> bool:
        if id(part) in self._open and not isinstance(part, Call):
            self._endless |= isinstance(part, list | dict | tuple | set)
        return id(part) not in self._done
