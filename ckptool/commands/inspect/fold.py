"""Names of tensors folded: repeated layers as one, with the numbers that differ in braces."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import STATE_CATEGORIES, begin_with_state, state_category
from ckptool.core.text import natural_key, ranges

_NUMBER = re.compile(r"([0-9](?:(?<![^.][0-9])|(?<=@rank[0-9]))(?:(?<!0)[0-9]{1,8})?(?![^.@]))")
"""A number between dots. It begins with a digit, and all else is looked at from there: re searches
for a set of characters many times as fast as for anything else."""

Numbers = tuple[int, ...]
Kind = TypeVar("Kind", bound=Hashable)
Looks = Callable[[TensorEntry], Hashable]


class TensorLine(Struct, frozen=True):
    """``count`` tensors similar to ``entry``; ``name`` has braces for the differing parts."""

    part: str
    name: str
    entry: TensorEntry
    count: int


def fold(entries: Collection[TensorEntry], looks: Looks | None = None) -> list[TensorLine]:
    """Return few lines that name every tensor once, in natural order within each part.

    Those of a line look alike: in type, shape and placements, or as ``looks`` says.
    """
    looks = looks or _looks
    entry_of = {entry.name: entry for entry in entries}
    kinds = {name: (state_category(entry), looks(entry)) for name, entry in entry_of.items()}
    lines = [
        TensorLine(part, name, entry_of[first], count)
        for name, first, (part, _), count in fold_names(kinds)
    ]
    lines.sort(key=lambda line: STATE_CATEGORIES.index(line.part))
    if all(line.part != "optimizer" for line in lines):
        return lines
    return _fold_optimizer(lines, list(entry_of), looks)


def fold_names(kinds: Mapping[str, Kind]) -> list[tuple[str, str, Kind, int]]:
    """Join names of one kind that differ only in numbers, in natural order.

    Each line has the name with braces, the first of its names, their kind, and how many they are.
    """
    groups: dict[tuple[tuple[str, ...], Kind], dict[Numbers, str]] = {}
    for name, kind in kinds.items():
        words, numbers = split_numbers(name)
        groups.setdefault((words, kind), {})[numbers] = name
    lines = []
    for (words, kind), members in groups.items():
        for axes in products(members):
            first = members[tuple(axis[0] for axis in axes)]
            lines.append((with_numbers(words, axes), first, kind, math.prod(map(len, axes))))
    return sorted(lines, key=lambda line: natural_key(line[1]))


def _looks(entry: TensorEntry) -> tuple[object, ...]:
    scattered = entry.placements is None and len(entry.chunks)
    return entry.dtype, entry.shape, entry.placements, scattered


def split_numbers(name: str) -> tuple[tuple[str, ...], Numbers]:
    """Split a dotted name into its integer components and the words around them."""
    pieces = _NUMBER.split(name)
    return tuple(pieces[::2]), tuple(map(int, pieces[1::2]))


def with_numbers(words: Sequence[str], axes: Sequence[Numbers]) -> str:
    """Rebuild a name, with several numbers at one place in braces."""
    name = words[0]
    for axis, word in zip(axes, words[1:], strict=True):
        name += (f"{{{ranges(axis)}}}" if len(axis) > 1 else str(axis[0])) + word
    return name


def products(tuples: Collection[Numbers]) -> list[tuple[Numbers, ...]]:
    """Return disjoint products of number sets whose union is the set of tuples."""
    if () in tuples:
        return [()]
    tails: dict[int, set[Numbers]] = {}
    for head, *tail in tuples:
        tails.setdefault(head, set()).add(tuple(tail))
    heads: dict[frozenset[Numbers], list[int]] = {}
    for head in sorted(tails):
        heads.setdefault(frozenset(tails[head]), []).append(head)
    return [(tuple(axis), *rest) for tail, axis in heads.items() for rest in products(tail)]


class _States(NamedTuple):
    """Where the names of an optimizer's tensors say the state: in the first step, or in the last.

    DeepSpeed's do in the first: ``exp_avg.NAME``.
    """

    is_first: bool

    def split(self, name: str) -> tuple[str, str]:
        """Return the state, and the rest of a name; no state if there is only one step."""
        if self.is_first:
            head, dot, tail = name.partition(".")
            return (head, tail) if dot else ("", name)
        head, _, tail = name.rpartition(".")
        return (tail, head) if head else ("", name)

    def join(self, state: str, rest: str) -> str:
        """Return the name of a state."""
        return f"{state}.{rest}" if self.is_first else f"{rest}.{state}"

    def ends(self, name: str) -> tuple[str, str] | None:
        """Return how names of one state begin and end, whatever the parameter; None if unclear."""
        if self.is_first:
            return f"{self.split(name)[0]}.", ""
        steps = name.split(".")
        return (".".join(steps[:2]) + ".", f".{steps[-1]}") if len(steps) > 3 else None


def _fold_optimizer(lines: list[TensorLine], names: list[str], looks: Looks) -> list[TensorLine]:
    """Join an optimizer's states of one parameter, and its 0-d states of all."""
    states = _States(begin_with_state(n.entry.name for n in lines if n.part == "optimizer"))
    return _fold_states(_fold_scalars(lines, names, looks, states), looks, states)


def _fold_scalars(
    lines: list[TensorLine], names: list[str], looks: Looks, states: _States
) -> list[TensorLine]:
    """Join an optimizer's 0-d states as ``optim.state.*.step``, if that matches no others."""
    groups: dict[tuple[str, str, object], list[TensorLine]] = {}
    for line in lines:
        is_scalar = line.part == "optimizer" and not line.entry.shape
        if is_scalar and (ends := states.ends(line.entry.name)) is not None:
            groups.setdefault((*ends, looks(line.entry)), []).append(line)
    merged: dict[str, TensorLine | None] = {}
    for (head, tail, _), group in groups.items():
        if len(group) == 1:
            continue
        count = sum(line.count for line in group)
        if count == sum(name.startswith(head) and name.endswith(tail) for name in names):
            merged |= dict.fromkeys(line.name for line in group)
            merged[group[-1].name] = replace(group[-1], name=f"{head}*{tail}", count=count)
    folded = [merged.get(line.name, line) for line in lines]
    return [line for line in folded if line is not None]


def _fold_states(lines: list[TensorLine], looks: Looks, states: _States) -> list[TensorLine]:
    """Join an optimizer's states of one parameter, such as ``{exp_avg,exp_avg_sq}``."""
    groups: dict[tuple[object, ...], list[TensorLine]] = {}
    for line in lines:
        state, rest = states.split(line.name)
        is_state = line.part == "optimizer" and state and not re.search(r"[{}*]", state)
        key = (rest, looks(line.entry)) if is_state and rest != "*" else (line,)
        groups.setdefault(key, []).append(line)
    result = []
    for first, *others in groups.values():
        state, rest = states.split(first.name)
        every = ",".join([state, *(states.split(line.name)[0] for line in others)])
        name = states.join(f"{{{every}}}", rest) if others else first.name
        count = sum(line.count for line in (first, *others))
        result.append(replace(first, name=name, count=count))
    return result
