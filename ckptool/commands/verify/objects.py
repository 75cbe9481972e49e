"""Whether the values beside the tensors are what a checkpoint holds, or a trap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.errors import Problem
from ckptool.formats._pickle import Call, Global

_DEEPEST = 100
_MOST_VALUES = 1_000_000


def odd_values(objects: Iterable[ObjectEntry]) -> list[Problem]:
    """Values that unfold to far more than they are, or that would call what is no function."""
    problems = []
    for entry in objects:
        for code, reason in dict(_Walk(entry.value).oddities()).items():
            problems.append(Problem(f"{entry.name}: {reason}", code, tensor=entry.name))
    return problems


class _Walk:
    """One look at a value, each part of it once, however often it is referred to."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()
        self._deepest = 0
        self._endless = self._computed = False

    def oddities(self) -> Iterator[tuple[str, str]]:
        """The codes that the value deserves, and why."""
        size = self._measure()
        if self._endless:
            yield "pickle-bomb", "a value that holds itself"
        elif size > _MOST_VALUES or self._deepest > _DEEPEST:
            yield (
                "pickle-bomb",
                f"a value of {self._deepest:,} levels that unfolds to {size:,} parts",
            )
        if self._computed:
            yield "value-odd", "a record that would call what is no class or function"

    def _measure(self) -> int:
        """How many parts the value has once unfolded; records that hold themselves count once."""
        stack: list[tuple[Any, list[Any] | None]] = [(self._value, None)]
        while stack:
            item, parts = stack.pop()
            if parts is not None:
                self._close(item, parts)
            elif id(item) not in self._sizes:
                parts = self._parts(item)
                self._open.add(id(item))
                self._deepest = max(self._deepest, len(self._open))
                stack.append((item, parts))
                stack += [(part, None) for part in parts if self._is_new(part)]
        return self._sizes[id(self._value)]

    def _is_new(self, part: Any) -> bool:
        if id(part) in self._open and not isinstance(part, Call):
            self._endless |= isinstance(part, list | dict | tuple | set)
        return id(part) not in self._sizes and id(part) not in self._open

    def _close(self, item: Any, parts: list[Any]) -> None:
        self._open.discard(id(item))
        self._sizes[id(item)] = 1 + sum(self._sizes.get(id(part), 1) for part in parts)

    def _parts(self, item: Any) -> list[Any]:
        if isinstance(item, Call):
            self._computed |= not isinstance(item.function, Global)
            return [item.function, item.args, item.state, item.items, item.entries]
        if isinstance(item, dict):
            return [*item.keys(), *item.values()]
        return list(item) if isinstance(item, list | tuple | set | frozenset) else []
