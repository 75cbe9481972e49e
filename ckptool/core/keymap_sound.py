"""What makes a rule of a key map work, both ways."""

from __future__ import annotations

import itertools

from ckptool.core.axes import Axis, axes_of
from ckptool.core.keymap import Pattern, Rule
from ckptool.errors import UsageError


def require_sound(rule: Rule) -> None:
    """UsageError where a rule does not say, both ways, which elements are which."""
    patterns = (*rule.sources, *rule.targets)
    if rule.only not in (None, "model", "optimizer"):
        raise UsageError(f"only = {rule.only!r} is neither model nor optimizer")
    if len({pattern.axes is None for pattern in patterns}) > 1:
        raise UsageError("either all names have their axes in brackets, or none")
    if rule.tie:
        _require_tie(rule)
    elif any(pattern.optional for pattern in patterns):
        raise UsageError("only a tie has an optional name")
    elif len(rule.sources) > 1 and len(rule.targets) > 1:
        raise UsageError("either from or to is a single name; split it into two rules")
    else:
        _require_same_axes(rule)


def _require_tie(rule: Rule) -> None:
    made = [pattern for pattern in (*rule.sources, *rule.targets) if not pattern.optional]
    if not rule.renames or len({pattern.spelled for pattern in made}) > 1:
        raise UsageError("the names of a tie have the same numbers, and no axes")
    if all(p.optional for p in rule.sources) or all(p.optional for p in rule.targets):
        raise UsageError("a tie needs a name on either side that is not optional")


def _require_same_axes(rule: Rule) -> None:
    """Every part holds every axis, or one of each sum; together they hold all but padding."""
    whole, parts = rule.whole, rule.parts
    sums = [axis for axis in axes_of(whole.axes or ()) if len(axis) > 1]
    held = [c for part in parts for c in itertools.product(*_choice(part, whole, sums))]
    twice = [combination for combination in held if held.count(combination) > 1]
    if twice:
        raise UsageError(f"two names hold {' '.join(twice[0])} of {whole.text!r}")
    missing = {c for c in set(itertools.product(*sums)) - set(held) if rule.padding not in c}
    if missing:
        raise UsageError(f"nothing holds {' '.join(min(missing))} of {whole.text!r}")
    if rule.padding is not None:
        _require_padding(rule.padding, sums, set(held))


def _require_padding(padding: str, sums: list[Axis], held: set[Axis]) -> None:
    if len(sums) != 1 or sums[0][-1] != padding or any(padding in c for c in held):
        raise UsageError(f"padding = {padding!r} is not the last of a sum that no part holds")


def _choice(part: Pattern, whole: Pattern, sums: list[Axis]) -> list[Axis]:
    """Which of each sum's axes a part holds; UsageError where the axes are not the same."""
    mine = {*((a,) for a in part.spelled), *axes_of(part.axes or ())}
    choices: list[Axis] = []
    for axis in sums:
        held = [one for one in mine if set(one) <= set(axis)]
        if len(held) != 1 or not _consecutive(held[0], axis):
            raise UsageError(f"{part.text!r} must hold just one of {' + '.join(axis)}")
        mine.remove(held[0])
        choices.append(held[0])
    theirs = {*((a,) for a in whole.spelled), *axes_of(whole.axes or ())} - set(sums)
    odd = sorted(itertools.chain(*(mine ^ theirs)))
    if odd:
        raise UsageError(f"the axis {odd[0]} is not both in {part.text!r} and in {whole.text!r}")
    return choices


def _consecutive(some: Axis, axis: Axis) -> bool:
    start = axis.index(some[0])
    return axis[start : start + len(some)] == some
