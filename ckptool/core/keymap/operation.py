"""How a rule's tensors are made, in words: ``join gate + up, stack expert``."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.core.keymap.axes import Sizes, axes_of, size_of
from ckptool.core.keymap.model import Pattern, Rule
from ckptool.core.keymap.sizes import kept_size


def operation(rule: Rule, target: Pattern, sizes: Sizes) -> str:
    """Return how a target of a rule is made, such as ``split q | k | v, permute``."""
    words = []
    whole = rule.whole
    if len({source.text for source in rule.sources}) > 1:
        words.append("join " + " + ".join(_name_parts(rule, rule.sources)))
    if len({part.text for part in rule.targets}) > 1:
        words.append("split " + " | ".join(_name_parts(rule, rule.targets)))
    if any(pattern.block is not None for pattern in (*rule.sources, *rule.targets)):
        words.append("reorder blocks")
    before = {axis for pattern in rule.sources for axis in rule.varying(pattern)}
    after = set(rule.varying(target))
    words += [f"stack {axis}" for axis in sorted(before - after)]
    words += [f"unstack {axis}" for axis in sorted(after - before)]
    words += _name_order(rule, rule.parts if whole is target else (target,))
    if rule.add:
        words.append(f"add {rule.add}")
    if rule.padding is not None and sizes[rule.padding]:
        words.append(padding(rule, sizes))
    return ", ".join(words) or "rename"


def padding(rule: Rule, sizes: Sizes) -> str:
    """Return ``unpad 112 to 103``, or ``pad 103 to 112``."""
    axis = next(axis for axis in rule.axes if rule.padding in axis)
    full, total = kept_size(axis, rule, sizes), size_of(axis, sizes) or 0
    if rule.whole in rule.targets:
        return f"pad {full:,} to {total:,}"
    return f"unpad {total:,} to {full:,}"


def _name_parts(rule: Rule, parts: Sequence[Pattern]) -> list[str]:
    """Return the axes of the first sum that distinguish the parts."""
    sums = [axis for axis in axes_of(rule.whole.axes or ()) if len(axis) > 1]
    return [
        " ".join(" + ".join(name) for name in axes_of(part.axes or ()) if set(name) < set(axis))
        for part in parts
        for axis in sums[:1]
    ]


def _name_order(rule: Rule, parts: tuple[Pattern, ...]) -> list[str]:
    """Return the word for a part whose axes are in another order than in the whole, if any."""
    dims = rule.whole.axes or ()
    whole = axes_of(dims)
    for part in parts:
        places = [
            place
            for axis in axes_of(part.axes or ())
            for place, whole_axis in enumerate(whole)
            if set(axis) <= set(whole_axis)
        ]
        if places != sorted(places):
            flat = all(len(dim) == 1 for dim in (*dims, *(part.axes or ())))
            return ["transpose" if flat else "permute"]
    return []
