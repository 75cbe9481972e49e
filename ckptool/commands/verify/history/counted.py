"""Whether all that a save counts has gone on since the last, as counts tell that went together.

A trainer that is known says what it counts. Of others, a value at the top that is called as a count
of all training goes on with what it went on with before: with the optimizer's steps, the number in
the save's name, or another count. What counts deeper in a save may rightly stop, as a warm-up does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from ckptool.commands.verify.checks.meaning.counts import UNCOUNTED
from ckptool.commands.verify.checks.meaning.trainer_counts import number_in
from ckptool.commands.verify.history.saves import Save, kind_of
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import state_category
from ckptool.errors import Problem

_DIFFER = "counts-differ"
_IN = ": "
_TAKEN, _NAMED = "the optimizer", "its name"
_COUNT = re.compile(
    r"(?i)(?:(?:global|train(?:er|ing)?|cur(?:rent)?)_?)?"
    r"(?:steps?|it|iters?|iterations?|epochs?|(?:num_?)?updates?|batch(?:es)?)"
    r"(?:_?(?:num|idx|no|train|completed|done|seen))*"
)
"""What a value is called that counts all of a training: no limit, nor what was best."""
_SCHEDULED, _RATES = ".last_epoch", "._last_lr"
"""What a scheduler counts, and the rates that it gave last, by the ends of their names."""
_OF_SWA = ".swa_lr"
"""What torch's SWALR adds to each group of an optimizer."""
_FAR = 2
"""How many times as far as before a rate changes at most if its scheduler gives it."""
_BASE, _LIMITS = ".base_lrs", (".T_max", ".total_iters", ".total_steps")
"""The rates that a warm-up leads to, and how many steps a scheduler takes at most."""


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
    scheduled = {name for name in scheduled if not _has_done(save, name)}
    if scheduled and 0 < growth[_TAKEN] <= more[_TAKEN] and _has_other_rate(*saves):
        name = min(scheduled)
        message = f"{_label(name, save)} is {counts[name]:,}, as in {last.name}, but {_TAKEN} has"
        message += f" gone on by {more[_TAKEN]:,.0f}, and has another learning rate than it gave"
        yield Problem(f"{message}: they are of two saves", _DIFFER)
    for name in stopped:
        went_on = [*_with_count(name, save, growth, more, old_counts)]
        went_on += [*_with_name(name, saves, old_counts, growth)] if not went_on else []
        for other, count in went_on[:1]:
            message = f"{_label(name, save)} is {counts[name]:,}, as in {last.name}, but"
            message += f" {_label(other, save)} has gone on by {count:,.0f}: they are of two saves"
            yield Problem(message, _DIFFER)


def _with_count(
    name: str,
    save: Save,
    growth: Mapping[str, float],
    more: Mapping[str, float],
    old_counts: Mapping[str, int],
) -> Iterator[tuple[str, float]]:
    """Yield the counts that went with one which has stopped, and have gone on as far as before.

    Epochs, and what grew by one, may have grown with another count by chance: if they are the
    save's own, only the same count in another file is meant.
    """
    is_own = name not in save.counts
    others = [n for n in sorted(more) if growth[n] == growth[name] and more[n] >= growth[n]]
    if is_own and (_counts_epochs(name) or growth[name] == 1):
        others = [n for n in others if _are_twins(n, name) and old_counts[n] == old_counts[name]]
    elif is_own:
        others = [n for n in others if not _counts_epochs(n)]
    yield from ((n, more[n]) for n in others if 0 < more[n] < old_counts[name])


def _with_name(
    name: str,
    saves: tuple[Save, Save, Save],
    old_counts: Mapping[str, int],
    growth: Mapping[str, float],
) -> Iterator[tuple[str, float]]:
    """Yield how far the number in the name has gone on, if a count that has stopped went with it.

    But for the end of training, which a loop may save once more under the next number.
    """
    (number, old_number, _), grown = (save.step.number for save in saves), growth[name]
    if name in saves[0].counts or (grown == 1 and not _counts_epochs(name)):
        return
    more = (number or 0) - (old_number or 0)
    went_with = _went_with([s.step.number for s in saves], old_counts[name], grown)
    if went_with and grown <= more < old_counts[name] and _was_trained(*saves[:2]):
        yield _NAMED, more


def _was_trained(save: Save, last: Save) -> bool:
    """Return whether weights are others than those of the last: a loop may save its end again."""
    return not save.weights.are_equal_to(last.weights)


def _counts_epochs(name: str) -> bool:
    return "epoch" in name.rpartition(_IN)[2].lower()


def _label(name: str, save: Save) -> str:
    """Return the name of a count, with the name of the file beside the save that has it."""
    for other in save.others:
        kind = kind_of(other.path)
        if name.startswith((f"{kind}{_IN}", f"{kind}.")):
            return f"{other.path.name}{name.removeprefix(kind)}"
    return name


def _counts_of(save: Save) -> Mapping[str, int]:
    """Return what a save counts, and what files beside it do, as of the other half of a GAN."""
    counts = {**dict(_own_counts(save.survey.catalog)), **dict(_scheduled(save)), **save.counts}
    for other in save.others:
        own = _own_counts(other.catalog)
        counts |= {f"{kind_of(other.path)}{_IN}{name}": count for name, count in own}
    return counts


def _are_twins(one: str, other: str) -> bool:
    """Return whether two files have the same count."""
    return one != other and one.rpartition(_IN)[2] == other.rpartition(_IN)[2]


def _own_counts(catalog: Catalog | None) -> Iterator[tuple[str, int]]:
    """Yield what values at the top count, by their names: steps, epochs."""
    for name, entry in catalog.objects.items() if catalog else ():
        is_count = len(entry.path) == 1 and _COUNT.fullmatch(name) is not None
        if is_count and _is_number(entry.value) and state_category(entry) != "optimizer":
            yield name, entry.value


def _scheduled(save: Save) -> Iterator[tuple[str, int]]:
    """Yield the steps of schedulers, by their names."""
    for name, value in save.values.items():
        if name.endswith(_SCHEDULED) and _beside(name, _RATES) in save.values and _is_number(value):
            yield name, value


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < UNCOUNTED


def _has_done(save: Save, name: str) -> bool:
    """Return whether a scheduler has taken all its steps, or has warmed up to its rates."""
    values = save.values
    rates, base = (values.get(_beside(name, end)) for end in (_RATES, _BASE))
    limits = (number_in(values, _beside(name, end)) for end in _LIMITS)
    count = number_in(values, name) or 0
    return rates == base or any(limit is not None and count >= limit for limit in limits)


def _has_other_rate(save: Save, last: Save, older: Save) -> bool:
    """Return whether only the last two saves have a rate that a scheduler gave, not this one.

    If it goes on as before, the scheduler gave it, too, but is of another save. Where it jumps, a
    user has set it, or SWA's scheduler, which trainings save or not.
    """
    if any(name.endswith(_OF_SWA) for name in save.optimizer_values):
        return False
    rate, last_rate, older_rate = (max(item.rates, default=0.0) for item in (save, last, older))
    change, before = rate - last_rate, last_rate - older_rate
    goes_on = 0 < change * before <= _FAR * before**2
    return goes_on and _gave_rate(last) and _gave_rate(older) and not _gave_rate(save)


def _gave_rate(save: Save) -> bool:
    """Return whether the optimizer has a rate that a scheduler gave last."""
    given = [rates for name, rates in save.values.items() if name.endswith(_RATES)]
    rates = [rate for rates in given if isinstance(rates, list) for rate in rates]
    return any(rate in save.rates for rate in rates)


def _beside(name: str, end: str) -> str:
    """Return the name of another value of a scheduler."""
    return f"{name.removesuffix(_SCHEDULED)}{end}"


def _went_with(numbers: list[int | None], count: int, growth: float) -> bool:
    """Return whether the last two saves had a count as the number in their names, or next to it."""
    pairs = zip(numbers[1:], (count, count - growth), strict=True)
    offsets = {None if number is None else number - value for number, value in pairs}
    return numbers[0] is not None and len(offsets) == 1 and offsets <= {-1, 0, 1}
