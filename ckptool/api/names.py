"""The names of a state dict and those of a checkpoint: which are the same, and what would help."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from ckptool.api.checkpoint import Checkpoint
from ckptool.commands.selection import only_model
from ckptool.errors import CannotDo, CkptoolError

_MOST_SHOWN = 12
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}
"""The steps that torch.compile, activation checkpointing, FSDP1 and DDP put into names."""


class KeysDiffer(CannotDo):
    """The state dict and the checkpoint do not have the same names.

    ``missing`` are those that only the state dict has, ``unexpected`` those that only the
    checkpoint has.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Matched(NamedTuple):
    """The names that both have, and those that only one has."""

    both: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def matched(checkpoint: Checkpoint, names: Collection[str]) -> Matched:
    """Which names of a state dict the checkpoint has. An empty dict in it is nothing to load."""
    catalog = checkpoint.catalog
    held = {*catalog.tensors, *catalog.objects, *catalog.conflicts}
    empty = {name for name, entry in catalog.objects.items() if entry.value == {}}
    return Matched(
        tuple(name for name in names if name in held),
        tuple(name for name in names if name not in held),
        tuple(sorted(held - empty - set(names))),
    )


def keys_differ(checkpoint: Checkpoint, found: Matched) -> KeysDiffer:
    """The error that lists what only one has, and says which keyword would fit the names."""
    lines = [
        f"  {what} ({len(names):,}): {', '.join(listed(names))}"
        for what, names in (("missing", found.missing), ("unexpected", found.unexpected))
        if names
    ]
    conflicts = checkpoint.catalog.conflicts
    lines += [f"  {conflicts[name]}" for name in found.unexpected if name in conflicts]
    error = KeysDiffer(
        f"{checkpoint.path} and the state dict do not have the same names:\n" + "\n".join(lines),
        hint=_hint(checkpoint, found),
    )
    error.missing, error.unexpected = found.missing, found.unexpected
    return error


def listed(items: Sequence[str]) -> list[str]:
    """The first of many, and how many more there are."""
    more = len(items) - _MOST_SHOWN
    return [*items[:_MOST_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]


def _hint(checkpoint: Checkpoint, found: Matched) -> str:
    if found.missing and {*found.both, *found.missing} <= _names_of_model(checkpoint):
        return "model_only=True fits the names"
    prefix = _other_prefix(found)
    if prefix is not None:
        return f"{prefix.keyword} fits the names"
    if any(_WRAPPERS & {*name.split(".")} for name in found.missing):
        return "torch.distributed.checkpoint.state_dict.get_model_state_dict(model) has plain names"
    if found.missing:
        return "rename=[REGEX=REPLACEMENT] or map fit names; strict=False loads what both have"
    if all(".state." in name for name in found.unexpected):
        return (
            "an optimizer has state once it has stepped; before that, get_optimizer_state_dict of"
            " torch.distributed.checkpoint.state_dict makes it"
        )
    return "model_only=True, select=[GLOB] or drop=[GLOB] leave names out, strict=False all others"


def _names_of_model(checkpoint: Checkpoint) -> set[str]:
    """The names of a checkpoint's tensors under ``model_only``."""
    try:
        return set(only_model(checkpoint.catalog).tensors)
    except CkptoolError:
        return set()


class _Prefix(NamedTuple):
    """What the checkpoint's names begin with, and the state dict's in its place."""

    old: str
    new: str

    @property
    def keyword(self) -> str:
        """What to open the checkpoint with."""
        if not self.new:
            return f"strip_prefix={self.old[:-1]!r}"
        return f"rename=[{'^' + re.escape(self.old) + '=' + self.new!r}]"

    def changed(self, name: str) -> str:
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name


def _other_prefix(found: Matched) -> _Prefix | None:
    """The one prefix by which all missing names differ from unexpected ones, if that is so."""
    if not found.missing or not found.unexpected:
        return None
    wanted = found.missing[0].split(".")
    steps = max((name.split(".") for name in found.unexpected), key=partial(_tail, wanted))
    tail = _tail(wanted, steps)
    old, new = ("".join(f"{s}." for s in name[: len(name) - tail]) for name in (steps, wanted))
    prefix = _Prefix(old, new)
    if any(name.startswith(old) for name in found.both):
        return None
    return prefix if {*map(prefix.changed, found.unexpected)} >= {*found.missing} else None


def _tail(one: Sequence[str], other: Sequence[str]) -> int:
    """How many steps at the end of two names are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
