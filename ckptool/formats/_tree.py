"""Flatten a nested state dict to named leaves, and nest named leaves again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.core.catalog import Index, Path, RankStep, flat_name
from ckptool.errors import CannotDo, Damaged, Problem
from ckptool.formats._pickle import Call
from ckptool.formats._quantised import quantised_parts

_DEEPEST = 100
_FEWEST_LEAVES = 100_000


def leaves(value: Any, *, what: str, pickled: int = 0) -> Iterator[tuple[Path, Any]]:
    """The leaves of a state dict with their paths, in order.

    As DCP flattens (torch 2.4 to 2.13): dicts are entered, defaultdicts as well, lists where a dict
    or a tensor lies inside. Tuples are entered where a tensor lies inside, which DCP would pickle
    whole, and so are the parts of quantised tensors. Everything else, and an empty container, is a
    leaf.

    ``pickled`` is the size in bytes of the pickle. Raises Damaged where the nesting has no end, or
    where the pickle refers to its own parts so often that it unfolds to more values than it has
    bytes.
    """
    yield from _Walk(max(pickled, _FEWEST_LEAVES), what).leaves(value, ())


class _Walk:
    """One walk over a state dict, with what is left of its bounds."""

    def __init__(self, most: int, what: str) -> None:
        self._left = most
        self._what = what
        self._entered: dict[int, bool] = {}

    def leaves(self, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        self._left -= 1
        if self._left < 0 or len(path) > _DEEPEST:
            message = (
                f"{self._what}: the state dict is nested more than {_DEEPEST} deep, or unfolds"
            )
            reason = "to more values than its pickle has bytes"
            raise Damaged(Problem(f"{message} {reason}", "pickle-bomb"))
        steps = self._steps(value)
        if steps is None:
            yield path, value
            return
        for step, item in steps:
            yield from self.leaves(item, (*path, step))

    def _steps(self, value: Any) -> list[tuple[Any, Any]] | None:
        """The steps into a container that is entered; None for a leaf."""
        if entries := _entries(value):
            return entries
        if not isinstance(value, list | tuple):
            parts = quantised_parts(value)
            return list(parts.items()) if parts else None
        if id(value) not in self._entered:
            self._entered[id(value)] = _is_entered(value, self._what)
        if not self._entered[id(value)]:
            return None
        container = "list" if isinstance(value, list) else "tuple"
        return [(Index(i, container), item) for i, item in enumerate(value)]


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a dict or defaultdict; none for every other value."""
    if isinstance(value, dict):
        return list(value.items())
    is_default = isinstance(value, Call) and value.name == "collections.defaultdict"
    return value.entries if is_default else []


def _is_entered(value: Any, what: str) -> bool:
    """Whether a list holds a dict or a tensor, or a tuple a tensor, at any depth."""
    seen: set[int] = set()
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        inside = item if isinstance(item, list | tuple) else [v for _, v in _entries(item)]
        if not inside or id(item) in seen:
            continue
        if depth > _DEEPEST:
            message = f"{what}: a value is nested more than {_DEEPEST} deep"
            raise Damaged(Problem(message, "pickle-bomb"))
        seen.add(id(item))
        if any(_is_tensor(inner) for inner in inside):
            return True
        if isinstance(item, list) and any(isinstance(inner, dict) for inner in item):
            return True
        stack += [(inner, depth + 1) for inner in inside]
    return False


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Call) and value.name.startswith(("torch._utils.", "torch._tensor."))


def unique_names(found: Iterable[tuple[Path, Any]], *, what: str) -> dict[str, tuple[Path, Any]]:
    """Leaves by their flat name; CannotDo where two paths give one name."""
    named: dict[str, tuple[Path, Any]] = {}
    for path, leaf in found:
        name = flat_name(path) or "value"
        if name in named:
            raise CannotDo(
                f"{what}: two values are called {name!r} once flattened:"
                f" {named[name][0]!r} and {path!r}"
            )
        named[name] = (path, leaf)
    return named


def holed_lists(paths: Iterable[Path]) -> set[Path]:
    """The paths of lists and tuples of which some positions are not there."""
    positions: dict[Path, set[int]] = {}
    for path in paths:
        for at, step in enumerate(path):
            if isinstance(step, Index):
                positions.setdefault(path[:at], set()).add(step.position)
    return {head for head, found in positions.items() if found != set(range(len(found)))}


def nest(found: Iterable[tuple[Path, Any]]) -> Any:
    """The nested state dict whose leaves lie at these paths.

    List positions must be complete; where some were dropped, the list becomes a dict of positions.
    """
    items = list(found)
    if len(items) == 1 and items[0][0] == ():
        return items[0][1]
    root: _Node = _Node()
    for path, leaf in items:
        node = root
        for step in path[:-1]:
            child = node.children.setdefault(step, _Node())
            if not isinstance(child, _Node):
                raise CannotDo(f"{flat_name(path)!r} lies inside another value")
            node = child
        if path[-1] in node.children:
            raise CannotDo(f"two values are called {flat_name(path)!r}")
        node.children[path[-1]] = leaf
    return root.built()


class _Node:
    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[Any, Any] = {}

    def built(self) -> Any:
        steps = list(self.children)
        values = [v.built() if isinstance(v, _Node) else v for v in self.children.values()]
        if steps and all(isinstance(step, Index) for step in steps):
            ordered = sorted(zip(steps, values, strict=True), key=lambda pair: pair[0].position)
            if [step.position for step, _ in ordered] == list(range(len(steps))):
                items = [value for _, value in ordered]
                return tuple(items) if steps[0].container == "tuple" else items
        return dict(zip(map(_as_key, steps), values, strict=True))


def _as_key(step: Any) -> Any:
    if isinstance(step, RankStep):
        return str(step)
    return step.position if isinstance(step, Index) else step
