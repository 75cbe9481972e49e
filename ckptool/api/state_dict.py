"""The leaves of a state dict, and how their names compare with those of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from ckptool.api.checkpoint import Checkpoint
from ckptool.commands.rewrite import only_model
from ckptool.commands.verify.compare.fit import Prefix, prefix_changes
from ckptool.core.catalog import Catalog, Index, Path
from ckptool.core.keymap.wrappers import WRAPPERS, unwrapping_rule
from ckptool.core.selection import drop_names, substitution
from ckptool.core.text import list_first
from ckptool.errors import CkptoolError, Unsupported, UsageError
from ckptool.serialization.state_dict.loadable import empty_dicts, with_loadable_paths
from ckptool.serialization.state_dict.mappings import enter_mappings


class StateLeaf(Struct, frozen=True):
    """A value, and the container that holds it under a key or index, the last step of its path."""

    container: Any
    key: Any
    value: Any
    path: Path

    @property
    def is_fixed(self) -> bool:
        """Return whether the value cannot be replaced."""
        return isinstance(self.container, tuple)

    def replace(self, value: Any) -> None:
        """Replace the value in its container."""
        self.container[self.key] = value


def leaves_of(state_dict: Mapping[str, Any], *, saved: bool = False) -> dict[str, StateLeaf]:
    """Return every leaf by the name of its catalog entry: its keys joined by dots.

    Flattens as DCP does (torch 2.4 to 2.13): dicts are entered, lists if they contain a dict or a
    tensor; and, as in catalogs, tuples if they contain a tensor. If it is to be ``saved``, empty
    dicts are leaves, and Counters, whose class is kept, and it may be any mapping. Raises TypeError
    for anything but a dict and for a module or optimizer in it, UsageError if two leaves have the
    same name, or if it has no end.
    """
    if not isinstance(state_dict, Mapping if saved else dict):
        raise TypeError(f"a state dict is a dict, not {_kind(state_dict)}")
    try:
        found = list(_leaves((), state_dict, Counter if saved else ()))
    except RecursionError:
        raise UsageError("the state dict contains itself, or is nested too deeply") from None
    leaves: dict[str, StateLeaf] = {}
    for leaf in found:
        name = ".".join(map(str, leaf.path))
        if not saved and isinstance(leaf.value, Mapping):
            continue
        if name in leaves:
            raise UsageError(f"two values of the state dict are named {name!r}, joined by dots")
        if _has_state(leaf.value):
            raise TypeError(f"a state dict has tensors and values: {name} is {_kind(leaf.value)}")
        leaves[name] = leaf
    return leaves


def _leaves(head: Path, container: Any, whole: Any) -> Iterator[StateLeaf]:
    """Yield the leaves of a container at a path; objects of the classes ``whole`` are such."""
    is_mapping, kind = isinstance(container, Mapping), type(container).__name__
    for key, value in container.items() if is_mapping else enumerate(container):
        path = (*head, key if is_mapping else Index(key, kind))
        is_filled = isinstance(value, Mapping) and bool(value) and not isinstance(value, whole)
        if is_filled or _is_entered(value):
            yield from _leaves(path, value, whole)
        else:
            yield StateLeaf(container, key, value, path)


def _is_entered(value: Any) -> bool:
    """Return whether a list contains a dict or a tensor, or a tuple a tensor, at any depth."""
    import torch

    if not isinstance(value, list | tuple):
        return False
    kinds = (torch.Tensor, Mapping) if isinstance(value, list) else torch.Tensor
    return any(isinstance(inner, kinds) or _is_entered(inner) for inner in value)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None))


def _kind(value: Any) -> str:
    """Name the type of a value, and suggest its state dict if it has one."""
    return f"a {type(value).__name__}" + ("; give its state_dict()" if _has_state(value) else "")


def flattened(checkpoint: Checkpoint, names: Container[str] = ()) -> Catalog:
    """Return what is in a checkpoint under the names of a state dict with the same values.

    Values with these ``names`` stay whole.
    """
    return enter_mappings(checkpoint.catalog, names)


def loadable(checkpoint: Checkpoint) -> Catalog:
    """Return what is in a checkpoint as torch's DCP flattens it, which stores no empty dicts."""
    catalog = flattened(checkpoint)
    return with_loadable_paths(drop_names(catalog, empty_dicts(catalog)))


class KeysDiffer(Unsupported):
    """The names of the state dict and the checkpoint differ.

    ``missing`` are only in the state dict, ``unexpected`` only in the checkpoint.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class NameMatch(NamedTuple):
    """The names that both sides have, and those that only one has."""

    both: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_names(checkpoint: Checkpoint, names: Collection[str]) -> NameMatch:
    """Compare a state dict's names with a checkpoint's; empty dicts in the latter do not count."""
    catalog = flattened(checkpoint, names)
    catalog_names = {*catalog.tensors, *catalog.objects, *catalog.conflicts}
    return NameMatch(
        tuple(name for name in names if name in catalog_names),
        tuple(name for name in names if name not in catalog_names),
        tuple(sorted(catalog_names.difference(empty_dicts(catalog), names))),
    )


def keys_differ(checkpoint: Checkpoint, matched: NameMatch, lenient: str) -> KeysDiffer:
    """Return the error that lists one-sided names, and the keyword that would match the names.

    ``lenient`` is what the caller can be told to load only names that both sides have.
    """
    lines = [
        f"  {what} ({len(names):,}): {', '.join(list_first(names))}"
        for what, names in (("missing", matched.missing), ("unexpected", matched.unexpected))
        if names
    ]
    conflicts = checkpoint.catalog.conflicts
    lines += [f"  {conflicts[name]}" for name in matched.unexpected if name in conflicts]
    error = KeysDiffer(
        f"{checkpoint.path} and the state dict do not have the same names:\n" + "\n".join(lines),
        hint=_hint(checkpoint, matched, lenient),
    )
    error.missing, error.unexpected = matched.missing, matched.unexpected
    return error


def _hint(checkpoint: Checkpoint, matched: NameMatch, lenient: str) -> str:
    if matched.missing and {*matched.both, *matched.missing} <= _names_of_model(checkpoint):
        return "use model_only=True to match the names"
    prefix = _other_prefix(matched)
    if prefix is not None:
        return f"use {prefix.keyword} to match the names"
    rule = unwrapping_rule(matched.unexpected)
    if rule and {*map(substitution(rule), matched.unexpected)} >= {*matched.missing}:
        return f"use rename=[{rule!r}] to match the names"
    if any({*WRAPPERS} & {*name.split(".")} for name in matched.missing):
        return "torch.distributed.checkpoint.state_dict.get_model_state_dict(model) has plain names"
    if matched.missing:
        return f"rename with rename=[REGEX=REPLACEMENT] or map; {lenient} loads what both have"
    if all(".state." in name for name in matched.unexpected):
        creates = "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict creates it"
        return f"an optimizer has no state before its first step; {creates}"
    return f"model_only=True, select=[NAME] or drop=[NAME] exclude names, {lenient} all of these"


def _names_of_model(checkpoint: Checkpoint) -> set[str]:
    """Return the names that a checkpoint's tensors have under ``model_only``."""
    try:
        return set(only_model(checkpoint.catalog).tensors)
    except CkptoolError:
        return set()


def _other_prefix(matched: NameMatch) -> Prefix | None:
    """Return the prefix by which all missing names differ from unexpected ones, if there is one."""
    for prefix in prefix_changes(matched.unexpected, matched.missing):
        if any(name.startswith(prefix.old) for name in matched.both):
            continue
        if {*map(prefix.changed, matched.unexpected)} >= {*matched.missing}:
            return prefix
    return None
