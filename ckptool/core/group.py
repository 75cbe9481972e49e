"""Tensors that a rule takes together, and how large its axes are in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptool.core.axes import Axis, axes_of, divides, show_axes, size_of, solve, unknown_axes
from ckptool.core.catalog import TensorEntry
from ckptool.core.keymap import Binding, Pattern, Rule
from ckptool.errors import CannotDo, UsageError

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a rule's source pattern takes, with the indexes that its name spells out."""

    pattern: Pattern
    binding: Binding
    entry: TensorEntry


class UnknownSizes(UsageError):
    """Sizes of axes that neither the shapes nor what is known of the model tell."""

    def __init__(self, names: Sequence[str], pattern: str) -> None:
        super().__init__(f"{pattern}: the size of {', '.join(names)} is not known")
        self.names = tuple(names)
        self.pattern = pattern

    def all_of(self, names: Sequence[str]) -> UnknownSizes:
        """The same error, for the sizes that several rules lack."""
        return UnknownSizes(names, self.pattern)


def group_sizes(rule: Rule, group: Sequence[Held], known: Sizes) -> dict[str, int]:
    """The sizes of all axes of a rule that are needed to carry the group over.

    Raises UnknownSizes; CannotDo where a shape is not what the axes say.
    """
    if rule.renames:
        return dict(known)
    given = {**known, **_spelled_sizes(rule, group)}
    if rule.padding is not None and rule.whole in rule.targets:
        given.setdefault(rule.padding, 0)
    odd = [held for held in group if len(held.pattern.axes or ()) != len(held.entry.shape)]
    if odd:
        raise _misfit(odd[0], given)
    shapes = [(held.pattern.axes or (), held.entry.shape) for held in group]
    sizes = solve(shapes, given, padding=rule.padding)
    wanted = {n for h in group for n in unknown_axes(h.pattern.axes or (), sizes)}
    wanted |= {a for p in (*rule.sources, *rule.targets) for a in p.spelled} - sizes.keys()
    for held in group:
        if not divides(held.pattern.axes or (), held.entry.shape, sizes):
            raise _misfit(held, sizes)
    if wanted - set(rule.common):
        raise UnknownSizes(sorted(wanted - set(rule.common)), rule.whole.text)
    for held in group:
        _require_fit(held, sizes)
    return sizes


def _spelled_sizes(rule: Rule, group: Sequence[Held]) -> dict[str, int]:
    """How many indexes the sources' names spell out of each axis that the targets' do not."""
    found: dict[str, int] = {}
    for held in group:
        for axis, index in held.binding.items():
            if axis not in rule.common:
                found[axis] = max(found.get(axis, 0), index + 1)
    return found


def _require_fit(held: Held, sizes: Sizes) -> None:
    for dim, length in zip(held.pattern.axes or (), held.entry.shape, strict=True):
        if math.prod(size_of(axis, sizes) or 0 for axis in dim) != length:
            raise _misfit(held, sizes)


def _misfit(held: Held, sizes: Sizes) -> CannotDo:
    axes = held.pattern.axes or ()
    named = [f"{n} {sizes[n]:,}" for axis in axes_of(axes) for n in axis if n in sizes]
    known = f" with {', '.join(named)}" if named else ""
    return CannotDo(
        f"{held.entry.name}: its shape {list(held.entry.shape)} is not [{show_axes(axes)}]{known}"
    )


def kept_size(axis: Axis, rule: Rule, sizes: Sizes) -> int:
    """The size of an axis without padding."""
    return sum(sizes[name] for name in axis if name != rule.padding)
