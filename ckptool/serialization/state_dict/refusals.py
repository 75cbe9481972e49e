"""A file's value, with why in place of each part that cannot be read, or must not be.

For readers to whom the value is a layout: what depends on a part that is refused cannot be placed,
all else can.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from ckptool.core.catalog import Path, flat_name
from ckptool.errors import Refusal
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import refusal_of

_DEEPEST = 100
_T = TypeVar("_T")


class Barred(Exception):
    """What is read depends on a part that is refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def require_readable(value: _T) -> _T:
    """Return the value; raise Barred where a part of it is refused."""
    why = refusal_in(value)
    if why is not None:
        raise Barred(why)
    return value


def refusal_in(value: Any) -> Refusal | None:
    """Return the first refusal among the dicts and lists of a value, or None."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, Refusal):
            return item
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            stack += item.values() if isinstance(item, dict) else item
    return None


def with_refusals(file: TorchFile, source: Source) -> tuple[Any, dict[Path, Refusal]]:
    """Return what a file holds, with a ``Refusal`` in place of each part that is refused.

    Parts are what its dicts and lists hold. Each refusal is returned by its path as well. What the
    dicts name besides, as keys or attributes, stays as it is.
    """
    walk = _Walk(file, source)
    return walk.readable(file.inert, ()), walk.refused


class _Walk:
    """One walk through the dicts and lists of a file; each is looked at once."""

    def __init__(self, file: TorchFile, source: Source) -> None:
        self._file, self._source = file, source
        self._known: dict[int, Any] = {}
        self._open: set[int] = set()
        self.refused: dict[Path, Refusal] = {}

    def readable(self, value: Any, path: Path) -> Any:
        """Return the value itself where nothing in it is refused, else a copy with why."""
        if isinstance(value, str | int | float | bytes | None):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = self._looked_at(value, path)
        return self._known[id(value)]

    def _looked_at(self, value: Any, path: Path) -> Any:
        is_entered = isinstance(value, dict | list | tuple) and id(value) not in self._open
        if not is_entered or len(path) > _DEEPEST:
            why = refusal_of(value, self._file, self._source, flat_name(path))
            if why is None:
                return value
            self.refused[path] = why
            return why
        self._open.add(id(value))
        items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
        changed = {
            step: found
            for step, item in items
            if (found := self.readable(item, (*path, step))) is not item
        }
        self._open.remove(id(value))
        return _replaced(value, changed) if changed else value


def _replaced(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of a dict, list or tuple in which some parts are others."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update(changed)
        return copied
    items = (changed.get(position, item) for position, item in enumerate(value))
    return tuple(items) if isinstance(value, tuple) else list(items)
