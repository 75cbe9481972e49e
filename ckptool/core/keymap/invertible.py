"""Require that a key map's rule determines, in both directions, which elements correspond."""

from __future__ import annotations

import itertools

from ckptool.core.keymap.axes import Axis, axes_of
from ckptool.core.keymap.model import Pattern, Rule
from ckptool.errors import UsageError


def require_invertible(rule: Rule) -> None:
    """Raise UsageError if a rule does not pair elements in both directions."""
    patterns = (*rule.sources, *rule.targets)
    if rule.only not in (None, "model", "optimizer"):
        raise UsageError(f"only = {rule.only!r} must be model or optimizer")
    if len({pattern.axes is None for pattern in patterns}) > 1:
        raise UsageError("give axes in brackets for all names or for none")
    if rule.tie:
        _require_tie(rule)
    elif any(pattern.optional for pattern in patterns):
        raise UsageError("optional names are allowed in ties only")
    elif len(rule.sources) > 1 and len(rule.targets) > 1:
        if len(rule.sources) != len(rule.targets) or rule.padding is not None:
            raise UsageError(
                "several tensors or blocks on both sides must pair up, in order and without "
                "padding:"
                f" `from` has {len(rule.sources)}, `to` {len(rule.targets)}"
            )
        for pair in rule.pairs:
            _require_same_axes(pair)
    else:
        _require_same_axes(rule)


def _require_tie(rule: Rule) -> None:
    required = [pattern for pattern in (*rule.sources, *rule.targets) if not pattern.optional]
    if not rule.renames or len({pattern.spelled for pattern in required}) > 1:
        raise UsageError("names of a tie must have the same numbers and no axes")
    if all(p.optional for p in rule.sources) or all(p.optional for p in rule.targets):
        raise UsageError("a tie needs a non-optional name on each side")


def _require_same_axes(rule: Rule) -> None:
    """Require that every part has every axis, or one of each sum; together all but padding."""
    whole, padding = rule.whole, rule.padding
    sums = [axis for axis in axes_of(whole.axes or ()) if len(axis) > 1]
    choices = [c for part in rule.parts for c in itertools.product(*_choice(part, whole, sums))]
    repeated = [choice for choice in choices if choices.count(choice) > 1]
    if repeated:
        raise UsageError(f"two names contain {' '.join(repeated[0])} of {whole.text!r}")
    missing = {c for c in set(itertools.product(*sums)) - set(choices) if padding not in c}
    if missing:
        raise UsageError(f"no name contains {' '.join(min(missing))} of {whole.text!r}")
    in_part = any(padding in choice for choice in choices)
    if padding is not None and (len(sums) != 1 or sums[0][-1] != padding or in_part):
        raise UsageError(f"padding = {padding!r} must be the last term of a sum and in no part")


def _choice(part: Pattern, whole: Pattern, sums: list[Axis]) -> list[Axis]:
    """Return the axis of each sum that a part has; UsageError if the other axes differ."""
    axes = {*((a,) for a in part.spelled), *axes_of(part.axes or ())}
    choices: list[Axis] = []
    for axis in sums:
        parts = [part_axis for part_axis in axes if set(part_axis) <= set(axis)]
        if len(parts) != 1 or not _is_consecutive(parts[0], axis):
            raise UsageError(f"{part.text!r} must contain exactly one of {' + '.join(axis)}")
        axes.remove(parts[0])
        choices.append(parts[0])
    expected = {*((a,) for a in whole.spelled), *axes_of(whole.axes or ())} - set(sums)
    differing = sorted(itertools.chain(*(axes ^ expected)))
    if differing:
        raise UsageError(f"axis {differing[0]} must be in both {part.text!r} and {whole.text!r}")
    return choices


def _is_consecutive(part: Axis, axis: Axis) -> bool:
    start = axis.index(part[0])
    return axis[start : start + len(part)] == part
