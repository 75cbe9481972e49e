"""Whether all that a save counts has gone on since the last, as counts tell that went together.

A trainer that is known says what it counts. Of others, any value that is called as counts are goes
on with what it went on with before: with the optimizer's steps, the number in the save's name, or
another count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptool.commands.runs.names import parse_name
from ckptool.commands.verify.checks.meaning.counts import UNCOUNTED
from ckptool.commands.verify.history.saves import Save
from ckptool.core.catalog import Catalog, Index
from ckptool.core.state_category import state_category
from ckptool.errors import Problem

_DIFFER = "counts-differ"
_IN = ": "
_TAKEN, _NAMED = "the optimizer", "its name"
_COUNT = re.compile(
    r"(?i)(?:(?:global|train(?:er|ing)?|cur(?:rent)?|total|num|n)_?)?"
    r"(?:steps?|it|iters?|iterations?|epochs?|updates?|batch(?:es)?)"
    r"(?:_?(?:num|idx|no|train|completed|done|seen))*"
)
"""What a value is called that counts all of a training, not what was best or evaluated last."""
_SCHEDULED, _RATES = ".last_epoch", "._last_lr"
"""What a scheduler counts, and the rates that it gave last, by the ends of their names."""
_DEEPEST = 2
"""The most names in a count's path: deeper ones may be of a part of a trainer."""


def old_counts(save: Save, last: Save, older: Save) -> Iterator[Problem]:
    """Yield the counts that a save has of the last, though one that went with them has gone on.

    A part of training that was begun again since the last may have come to the same count. A
    scheduler that has done its part stays where it is, and another one gives the rate.
    """
    saves = save, last, older
    counts, old_counts, older_counts = (_counts_of(item) for item in saves)
    names = counts.keys() & old_counts.keys() & older_counts.keys()
    growth: dict[str, float] = {name: old_counts[name] - older_counts[name] for name in names}
    more: dict[str, float] = {name: counts[name] - old_counts[name] for name in names}
    stopped = sorted(name for name in names if not more[name] and growth[name] > 0)
    if stopped:
        taken, old_taken, older_taken = (item.most_steps_taken for item in saves)
        growth[_TAKEN], more[_TAKEN] = old_taken - older_taken, taken - old_taken
    scheduled = {n for n in stopped if n.endswith(_SCHEDULED) and n not in save.counts}
    stopped = [name for name in stopped if name not in scheduled]
    if scheduled and 0 < growth[_TAKEN] <= more[_TAKEN] and _has_other_rate(*saves):
        name = min(scheduled)
        message = f"{name} has counted {counts[name]:,} steps, as in {last.name}, but the optimizer"
        message += f" has {more[_TAKEN]:,.0f} more, and another learning rate than it gave"
        yield Problem(f"{message}: they are of two saves", _DIFFER)
    numbers = [item.step.number for item in saves]
    for name in stopped:
        others = {n: more[n] for n in sorted(more) if growth[n] == growth[name]}
        is_own = name not in save.counts
        if is_own and growth[name] == 1:  # one may count epochs, and the other saves
            twins = {n for n in others if _are_twins(n, name) and old_counts[n] == old_counts[name]}
            others = {n: others[n] for n in others if n in save.counts or n in twins}
            is_own = "epoch" in name
        if is_own and _went_with(numbers, old_counts[name], older_counts[name]):
            others[_NAMED] = (numbers[0] or 0) - (numbers[1] or 0)
        other = next((n for n in others if 0 < others[n] < counts[name]), None)
        if other is not None:
            unit = "epochs" if "epoch" in name and name not in save.counts else "steps"
            message = f"{name} has counted {counts[name]:,} {unit}, as in {last.name}, but"
            message += f" {other} has {others[other]:,.0f} more: they are of two saves"
            yield Problem(message, _DIFFER)


def _counts_of(save: Save) -> Mapping[str, int]:
    """Return what a save counts, and what files beside it do, as of the other half of a GAN."""
    catalog = save.survey.catalog
    counts = {**dict(_own_counts(catalog) if catalog else ()), **save.counts}
    for other in save.others:
        kind = parse_name(other.path.name, is_folder=False).kind
        own = _own_counts(other.catalog) if other.catalog else ()
        counts |= {f"{kind}{_IN}{name}": count for name, count in own}
    return counts


def _are_twins(one: str, other: str) -> bool:
    """Return whether two files have the same count."""
    return one != other and one.rpartition(_IN)[2] == other.rpartition(_IN)[2]


def _own_counts(catalog: Catalog) -> Iterator[tuple[str, int]]:
    """Yield what values count, by their names: steps, epochs, the steps of a scheduler."""
    for name, entry in catalog.objects.items():
        if type(entry.value) is not int or not 0 <= entry.value < UNCOUNTED:
            continue
        depth = sum(not isinstance(step, Index) for step in entry.path)
        if not 0 < depth <= _DEEPEST or state_category(entry) == "optimizer":
            continue
        is_scheduled = name.endswith(_SCHEDULED) and _rates_beside(name) in catalog.objects
        if is_scheduled or _COUNT.fullmatch(str(entry.path[-1])):
            yield name, entry.value


def _has_other_rate(save: Save, last: Save, older: Save) -> bool:
    """Return whether only the last two saves have a rate that a scheduler gave, not this one."""
    return _gave_rate(last) and _gave_rate(older) and not _gave_rate(save)


def _gave_rate(save: Save) -> bool:
    """Return whether the optimizer has a rate that a scheduler gave last."""
    objects = save.survey.catalog.objects if save.survey.catalog else {}
    given = [entry.value for name, entry in objects.items() if name.endswith(_RATES)]
    rates = [rate for rates in given if isinstance(rates, list) for rate in rates]
    return any(rate in save.rates for rate in rates)


def _rates_beside(name: str) -> str:
    return f"{name.removesuffix(_SCHEDULED)}{_RATES}"


def _went_with(numbers: list[int | None], count: int, older: int) -> bool:
    """Return whether the last two saves had a count as the number in their names, or next to it."""
    pairs = zip(numbers[1:], (count, older), strict=True)
    offsets = {None if number is None else number - value for number, value in pairs}
    return numbers[0] is not None and len(offsets) == 1 and offsets <= {-1, 0, 1}
