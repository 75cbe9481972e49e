"""How large values are once they are written out, where they refer to their parts many times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptool.errors import Damaged
from ckptool.serialization.pickle.records import Call

MOST_TIMES = 16
MOST_PARTS = 1_000_000
_COUNTED = 10**15
"""Sizes are counted up to here: each doubling would make a number one bit longer."""
_SCALARS = frozenset([str, int, float, bool, complex, bytes, bytearray, type(None)])


class Unfolding:
    """Measures values of one checkpoint, each part once, however often it is referred to.

    ``held`` counts the parts that were met. The values must outlive this object.
    """

    def __init__(self) -> None:
        self.held = 0
        self._sizes: dict[int, int] = {}

    def parts(self, value: Any) -> int:
        """Return how many parts a value has once written out, where countless at most ``_COUNTED``.

        What holds itself counts once.
        """
        stack: list[tuple[Any, list[Any] | None]] = [(value, None)]
        while stack:
            item, inner = stack.pop()
            if inner is not None:
                size = self._sizes[id(item)] + sum(map(self._size, inner))
                self._sizes[id(item)] = min(size, _COUNTED)
            elif type(item) not in _SCALARS and id(item) not in self._sizes:
                inner = inner_parts(item)
                self.held += 1 + len(inner)
                self._sizes[id(item)] = 1
                if _SCALARS.issuperset(map(type, inner)):
                    self._sizes[id(item)] += len(inner)
                    continue
                stack.append((item, inner))
                stack += [(part, None) for part in inner]
        return self._size(value)

    def is_bounded(self, size: int) -> bool:
        """Return whether a number of parts is in proportion to those that were met."""
        return size <= MOST_PARTS + MOST_TIMES * self.held

    def _size(self, item: Any) -> int:
        return self._sizes.get(id(item), 1)


def inner_parts(value: Any) -> list[Any]:
    """Return what a value refers to."""
    if isinstance(value, Call):
        made = [value.function, value.args, value.state]
        return [*made, value.items, value.entries] if value.is_filled else made
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def require_bounded(values: Iterable[Any], *, what: str) -> None:
    """Raise Damaged where values refer to their parts so often that writing them has no end."""
    unfolding = Unfolding()
    size = min(sum(map(unfolding.parts, values)), _COUNTED)
    if not unfolding.is_bounded(size):
        message = f"{what}: {unfolding.held:,} values refer to one another so often that they"
        message += f" expand to {'more than ' if size == _COUNTED else ''}{size:,}"
        raise Damaged(message, "pickle-bomb")
