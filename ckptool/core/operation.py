"""What a rule does to a tensor, in words."""

from __future__ import annotations

from ckptool.core.axes import axes_of, size_of
from ckptool.core.group import Sizes, kept_size
from ckptool.core.keymap import Pattern, Rule


def operation(rule: Rule, target: Pattern, sizes: Sizes) -> str:
    """How a target of a rule is made, such as ``split q | k | v, permute``."""
    return ", ".join(_words(rule, target, sizes)) or "rename"


def _words(rule: Rule, target: Pattern, sizes: Sizes) -> list[str]:
    words = []
    whole = rule.whole
    if whole is target and len(rule.sources) > 1:
        words.append("join " + " + ".join(_parts_named(rule)))
    if whole is not target and len(rule.targets) > 1:
        words.append("split " + " | ".join(_parts_named(rule)))
    before = {axis for pattern in rule.sources for axis in pattern.spelled} - set(rule.common)
    after = set(target.spelled) - set(rule.common)
    words += [f"stack {axis}" for axis in sorted(before - after)]
    words += [f"unstack {axis}" for axis in sorted(after - before)]
    words += _order(rule, rule.parts if whole is target else (target,))
    if rule.padding is not None and sizes[rule.padding]:
        words.append(padding(rule, sizes))
    return words


def padding(rule: Rule, sizes: Sizes) -> str:
    """``unpad 112 to 103``, or the other way."""
    axis = next(axis for axis in rule.axes if rule.padding in axis)
    full, total = kept_size(axis, rule, sizes), size_of(axis, sizes) or 0
    if rule.whole in rule.targets:
        return f"pad {full:,} to {total:,}"
    return f"unpad {total:,} to {full:,}"


def _parts_named(rule: Rule) -> list[str]:
    """The axes of a sum that tell the parts apart."""
    sums = [axis for axis in axes_of(rule.whole.axes or ()) if len(axis) > 1]
    return [
        " ".join(" + ".join(one) for one in axes_of(part.axes or ()) if set(one) < set(axis))
        for part in rule.parts
        for axis in sums[:1]
    ]


def _order(rule: Rule, parts: tuple[Pattern, ...]) -> list[str]:
    """Whether some part has its axes in another order than the whole."""
    dims = rule.whole.axes or ()
    whole = axes_of(dims)
    for part in parts:
        places = [
            place
            for axis in axes_of(part.axes or ())
            for place, one in enumerate(whole)
            if set(axis) <= set(one)
        ]
        if places != sorted(places):
            flat = all(len(dim) == 1 for dim in (*dims, *(part.axes or ())))
            return ["transpose" if flat else "permute"]
    return []
