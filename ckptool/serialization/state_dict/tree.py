"""Flatten a nested state dict to named leaves, and nest named leaves again."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any

from msgspec import Struct

from ckptool.core.catalog import Index, Path, RankStep, flat_name
from ckptool.errors import Damaged, Unsupported
from ckptool.serialization.archive.quantized import QUANTIZED, split_quantized
from ckptool.serialization.archive.sharded_state import split_sharded_state
from ckptool.serialization.archive.tensors import (
    SUBCLASS,
    find_wrapper_class,
    is_tensor_record,
    split_wrapper,
    unwrap,
)
from ckptool.serialization.pickle.records import Call, OrderedMapping, PickleValue, state_fields
from ckptool.serialization.state_dict.values import Repeated

_DEEPEST = 100
_FEWEST_LEAVES = 100_000
"""Values that any pickle may have: one that shares its parts has fewer bytes than values."""


class Module(Struct, frozen=True):
    """What a module contains itself, by name, and its submodules."""

    tensors: list[tuple[str, Any]]
    children: list[tuple[str, Any]]


def module_state(value: PickleValue) -> Module | None:
    """Return a module's content in the order of ``state_dict()``; None for all else.

    A module is an object whose attributes are saved as in memory (torch 1.0 to 2.15):
    ``_parameters``, ``_buffers`` and ``_modules``, each a dict by name, and the set of the names of
    buffers that are not saved. Additions by a class's own code are unknown.
    """
    if not isinstance(value, Call) or value.state is None:
        return None
    fields = value.fields
    names = ("_parameters", "_buffers", "_modules")
    parts = [part for name in names if isinstance(part := fields.get(name), dict)]
    if len(parts) < len(names):
        return None
    parameters, buffers, modules = parts
    skipped = _names(fields.get("_non_persistent_buffers_set"))
    saved = [(name, buffer) for name, buffer in buffers.items() if name not in skipped]
    tensors = [*parameters.items(), *saved]
    return Module(
        [(str(name), tensor) for name, tensor in tensors if tensor is not None],
        [(str(name), child) for name, child in modules.items() if child is not None],
    )


def _names(value: PickleValue) -> set[str]:
    """Return the members of a set of names, as protocol 2 or later ones write it."""
    if isinstance(value, Call) and len(value.args) == 1:
        value = value.args[0]
    names = value if isinstance(value, list | tuple | set | frozenset) else ()
    return {name for name in names if isinstance(name, str)}


class StateDictWalk:
    """Flattens a state dict, as DCP does (torch 2.4 to 2.13).

    Dicts are entered, including defaultdicts, and lists that contain a dict or a tensor. Also
    entered are values that DCP would pickle whole: tuples that contain a tensor, the parts of
    quantized tensors and of tensor subclasses that wrap others, and modules, whose names are those
    of ``state_dict()``. Everything else, and an empty container, is a leaf; a container in itself
    is one that is ``Repeated``. ``notes`` are remarks for the user on how values were entered, by
    the values' paths; ``attributes`` are those of the dicts that were, such as ``_metadata``.

    ``pickled`` is the size in bytes of the pickle. Raises Damaged if the nesting has no end, or if
    the pickle refers to its own parts so often that it expands to more values than it has bytes.
    """

    def __init__(self, what: str, pickled: int = 0) -> None:
        self._budget = max(pickled, _FEWEST_LEAVES)
        self._what = what
        self._entered: dict[int, bool] = {}
        self._modules: dict[int, Module | None] = {}
        self._open: dict[int, Path] = {}
        self.notes: dict[Path, str] = {}
        self.attributes: dict[Path, dict[str, Any]] = {}

    def leaves(self, value: PickleValue, path: Path = ()) -> Iterator[tuple[Path, Any]]:
        """Yield the leaves of the value at ``path`` with their paths, in order."""
        self._count(len(path))
        if id(value) in self._open:
            yield path, Repeated(_display_name(self._open[id(value)]))
        elif isinstance(value, Call) and (module := self._module(value)):
            yield from self._module_leaves(value, module, path)
        elif (steps := self._steps(value, path)) is None:
            yield path, value
        else:
            self._open[id(value)] = path
            if isinstance(value, OrderedMapping) and (state := getattr(value, "state", None)):
                self.attributes[path] = state_fields(state)
            for step, item in steps:
                yield from self.leaves(item, (*path, step))
            del self._open[id(value)]

    def _count(self, depth: int) -> None:
        """Count a value at a depth. Raises Damaged if there are too many, or it is too deep."""
        self._budget -= 1
        if self._budget < 0 or depth > _DEEPEST:
            message = f"{self._what}: the state dict is nested more than {_DEEPEST} deep, or"
            message += " expands to more values than its pickle has bytes"
            raise Damaged(message, "pickle-bomb")

    def _module(self, value: PickleValue) -> Module | None:
        """Return a module's content, looked up once however often the pickle refers to it."""
        if not isinstance(value, Call):
            return None
        if id(value) not in self._modules:
            self._modules[id(value)] = module_state(value)
        return self._modules[id(value)]

    def _module_leaves(self, value: Call, module: Module, path: Path) -> Iterator[tuple[Path, Any]]:
        """Yield the leaves of a module as ``state_dict()`` names them, or else the module."""
        entries = list(self._module_entries(value, module, path, ()))
        if entries:
            self.notes[path] = (
                f"{_display_name(path)} is a module ({value.name}): reading its parameters and"
                " buffers, named as by the default state_dict(); nothing else of it is carried over"
            )
        yield from entries or [(path, value)]

    def _module_entries(
        self, value: Call, module: Module, path: Path, within: tuple[str, ...]
    ) -> Iterator[tuple[Path, Any]]:
        """Yield the leaves of a module that is ``within`` others of a module at ``path``."""
        self._open[id(value)] = (*path, *within)
        for name, tensor in module.tensors:
            yield from self.leaves(tensor, (*path, ".".join((*within, name))))
        for name, child in module.children:
            inner, below = self._module(child), (*within, name)
            self._count(len(path) + len(below))
            if inner is None or id(child) in self._open:
                yield from self.leaves(child, (*path, ".".join(below)))
            else:
                yield from self._module_entries(child, inner, path, below)
        del self._open[id(value)]

    def _steps(self, value: PickleValue, path: Path) -> list[tuple[Any, Any]] | None:
        """Return the steps into a container that is entered; None for a leaf."""
        if entries := _entries(value):
            return entries
        if is_tensor_record(value):
            return self._parts(value, path)
        if not isinstance(value, list | tuple):
            return None
        if id(value) not in self._entered:
            self._entered[id(value)] = _is_entered(value, self._what, self._entered)
        if not self._entered[id(value)]:
            return None
        container = "list" if isinstance(value, list) else "tuple"
        return [(Index(i, container), item) for i, item in enumerate(value)]

    def _parts(self, value: PickleValue, path: Path) -> list[tuple[Any, Any]] | None:
        """Return the parts of a tensor that consists of others; None for every other one."""
        record = unwrap(value)
        if not isinstance(record, Call) or record.name not in (QUANTIZED, SUBCLASS):
            return None
        parts = split_quantized(record) or split_sharded_state(value)
        if parts is None and (parts := split_wrapper(record)):
            inner = [name for name, part in parts.items() if is_tensor_record(part)]
            self.notes[path] = (
                f"{_display_name(path)} is a tensor subclass ({find_wrapper_class(record)}):"
                f" reading the tensors stored in it ({', '.join(inner)})"
            )
        return list(parts.items()) if parts else None


def _display_name(path: Path) -> str:
    return flat_name(path) or "the whole value"


def _entries(value: PickleValue) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dict or defaultdict; none for every other value."""
    if isinstance(value, Call) and _is_dict(value):
        return value.entries
    return list(value.items()) if isinstance(value, dict) else []


def _is_dict(value: PickleValue) -> bool:
    is_default = isinstance(value, Call) and value.name == "collections.defaultdict"
    return is_default or isinstance(value, dict)


def _is_entered(value: PickleValue, what: str, answers: dict[int, bool]) -> bool:
    """Return whether a list contains a dict or a tensor, or a tuple a tensor, at any depth.

    ``answers`` are those for parts visited before; parts without any are added as False.
    """
    ids: set[int] = set()
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        parts = item if isinstance(item, list | tuple) else [v for _, v in _entries(item)]
        if not parts or id(item) in ids or answers.get(id(item)) is False:
            continue
        if depth > _DEEPEST:
            message = f"{what}: a value is nested more than {_DEEPEST} levels deep"
            raise Damaged(message, "pickle-bomb")
        ids.add(id(item))
        if any(is_tensor_record(inner) or module_state(inner) for inner in parts):
            return True
        if isinstance(item, list) and any(map(_is_dict, item)):
            return True
        stack += [(inner, depth + 1) for inner in parts]
    answers.update(dict.fromkeys(ids, False))
    return False


def assign_names(entries: Iterable[tuple[Path, Any]]) -> dict[str, tuple[Path, Any]]:
    """Return leaves by their flat name.

    Of several paths with one name the shortest keeps it, whatever their order; of equally long
    paths, the one of text before numbers. The others are called ``NAME@2`` and so on. A leaf at the
    root, or under an empty key, is a ``value``.
    """
    by_name: dict[str, list[tuple[Path, Any]]] = {}
    for path, leaf in entries:
        by_name.setdefault(flat_name(path) or "value", []).append((path, leaf))
    leaves = {name: group[0] for name, group in by_name.items()}
    for name, group in by_name.items():
        if len(group) > 1:
            leaves[name], *rest = sorted(group, key=lambda entry: _order_of(entry[0]))
            for entry in rest:
                leaves[find_free_name(name, leaves)] = entry
    return leaves


def find_free_name(name: str, used: Container[str]) -> str:
    """Return the first of ``NAME@2``, ``NAME@3``, ... that is not used."""
    return next(free for n in itertools.count(2) if (free := f"{name}@{n}") not in used)


def _order_of(path: Path) -> tuple[bool, int, list[tuple[str, bool, str]]]:
    steps = [(str(step), not isinstance(step, str), type(step).__name__) for step in path]
    return not flat_name(path), len(path), steps


def nest(entries: Iterable[tuple[Path, Any]]) -> Any:
    """Return the nested state dict whose leaves are at these paths.

    List indices must be complete; if some were dropped, the list becomes a dict of indices.
    """
    items = list(entries)
    if len(items) == 1 and items[0][0] == ():
        return items[0][1]
    root = _Branch()
    for path, leaf in items:
        if not path:
            raise Unsupported("torch cannot nest a value without a name beside others")
        node = root
        for step in path[:-1]:
            child = node.children.setdefault(step, _Branch())
            if not isinstance(child, _Branch):
                raise Unsupported(f"{flat_name(path)!r} is inside another value")
            node = child
        if path[-1] in node.children:
            raise Unsupported(f"duplicate value {flat_name(path)!r}")
        node.children[path[-1]] = leaf
    return root.build()


class _Branch:
    """A container being assembled: its children by step, nodes or leaves."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[Any, Any] = {}

    def build(self) -> Any:
        steps = list(self.children)
        values = [v.build() if isinstance(v, _Branch) else v for v in self.children.values()]
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
