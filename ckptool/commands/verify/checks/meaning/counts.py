"""Whether the parts of a checkpoint count to the same step.

Much may rightly differ: an optimizer that was begun again, learning rates by epochs, samples or
processes, data in batches that grew. So a number is compared only with one that its trainer writes
beside it in the same save, or found to be one that no step can leave.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckptool.commands.open import Survey
from ckptool.commands.verify.checks.meaning.trainer_counts import (
    Schedule,
    Trainer,
    Values,
    number_in,
    trainers_of,
)
from ckptool.commands.verify.checks.optimizer_names import StateName
from ckptool.core.catalog import Catalog
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.companions import RANDOM_STATES
from ckptool.serialization.source import read_metadata
from ckptool.serialization.state_dict.leaves import read_file_leaves
from ckptool.storage.files import Files
from ckptool.storage.place import file_at
from ckptool.storage.url import Location

_DIFFER = "counts-differ"
_FIRST = 2
"""Steps of which a save is not the first: some trainers count from zero, others from one."""
_RATES = ("param_groups.0.lr", "optimizer.param_groups.0.lr")
"""The learning rate in an optimizer.pt, and in DeepSpeed's files; the optimizer of a second
``train()`` is the first's."""
_SCHEDULER = re.compile(r"scheduler(?:_\d+)?\.bin")
_OWN_RATE = re.compile(r"optimizer(?:_\d+)?\.param_groups\.\d+\.lr")
_GIVEN_RATES = re.compile(r"(scheduler(?:_\d+)?)\._last_lr")
"""accelerate's files of schedulers, and the learning rates in its files."""
_SLOW = 4
"""Steps of the shortest epoch, after each of which a scheduler may count instead."""
_SCALER = re.compile(r"(?:meta\.)?\w+Precision\.scale")
_FIRST_RATE = re.compile(r"(?:optimizer_states\.|optimizer_)\d+\.param_groups\.0\.lr")
"""What Lightning saves of loss scaling, and of each of its optimizers."""
UNCOUNTED = 1 << 53
"""More steps than anything counts one by one in a float."""
_LONGEST = 64
"""Bytes of a pointer's file."""
_SCALINGS = 200
"""Steps that loss scaling does not skip one after the other: 2 ** 32 is 1 after 64 of them."""


def count_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield the counts in parts of a checkpoint that do not agree with its step."""
    for trainer, step, values in trainers_of(surveyed, catalog):
        samples = number_in(values, trainer.samples)
        is_set = trainer.may_be_set and samples is not None and samples < step
        for problem in _check_step(trainer, values, surveyed.path, step):
            yield problem.recoded("counts-apart") if is_set else problem


def optimizer_step_problems(
    surveyed: Survey, optimizer: Catalog | None, read: Mapping[str, float]
) -> Iterator[Problem]:
    """Yield a problem if an optimizer has taken other steps than its trainer counts.

    ``optimizer`` is the checkpoint itself or a file beside it, ``read`` the steps of its optimizers
    that tensors count. They are fewer if an optimizer was begun again, and one more before the
    first (DeepSpeed's Adam). A single file is of one save.
    """
    if surveyed.catalog is None or optimizer is None:
        return
    if optimizer is surveyed.catalog and any(map(RANDOM_STATES.fullmatch, surveyed.source.files)):
        yield from _check_rates(optimizer, read, _schedules_in(surveyed.source))
    are_several = optimizer is not surveyed.catalog or len(optimizer.files) > 1
    totals = steps_of_each(optimizer, read)
    for trainer, step, values in trainers_of(surveyed, surveyed.catalog) if totals else ():
        if trainer.counts:
            yield from _check_totals(totals, values, step)
        steps, total = step - (number_in(values, trainer.skipped) or 0), max(totals.values())
        count = number_in(values, trainer.stepped)
        if count is None or not 0 < total < UNCOUNTED:
            continue
        is_other = are_several and steps > 0 and _has_other_rate(trainer, values, optimizer)
        message = f"the optimizer has taken {total:,g} steps, but {trainer.step} is {step:,}"
        if is_other and count != step:
            message = f"{trainer.stepped} is {count:,}, but {trainer.step} is {step:,}, and the"
            message += " optimizer has another learning rate than it gave: they are of two saves"
            yield Problem(message, _DIFFER)
        elif is_other and not steps <= total <= steps + 1:
            yield Problem(f"{message}: they are of two saves", _DIFFER)
        elif count == step and total < steps:
            message = f"the optimizer has taken {total:,g} of {steps:,} steps: it was begun again,"
            yield Problem(f"{message} or is of an earlier save", "counts-apart")
        elif count == step and total > steps + 1 and not trainer.may_take_more:
            message += ": it had taken some before, or takes several at a time"
            yield Problem(message, "counts-apart")


def steps_of_each(optimizer: Catalog, read: Mapping[str, float]) -> Mapping[str, float]:
    """Return how many steps each optimizer has taken, as tensors that were read or values count."""
    steps = dict(read)
    for name, entry in optimizer.objects.items():
        of = StateName.of(name)
        if of.counts_steps and type(entry.value) in (int, float):
            steps[of.optimizer] = max(steps.get(of.optimizer, 0), entry.value)
    return steps


def _check_totals(totals: Mapping[str, float], values: Values, step: int) -> Iterator[Problem]:
    """Yield a problem if all optimizers together have taken fewer steps than the trainer counts.

    Steps that loss scaling skips are counted, and so may be one without gradients (SWA).
    """
    is_scaled = any(_SCALER.fullmatch(name) for name in values)
    groups = sum(bool(_FIRST_RATE.fullmatch(name)) for name in values)
    if not is_scaled and groups == len(totals) and sum(totals.values()) + _FIRST < step:
        yield _fewer_than_all(totals, step, "optimizers")


def _fewer_than_all(totals: Mapping[str, float], step: int, what: str) -> Problem:
    sums = ", ".join(f"{count:,g} of {name}" for name, count in totals.items())
    message = f"{sums} are fewer than the {step:,} steps of all {what}: one was begun again, or is"
    return Problem(f"{message} of an earlier save", "counts-apart")


def _has_other_rate(trainer: Trainer, values: Values, optimizer: Catalog) -> bool:
    """Return whether an optimizer's learning rate is not among those its scheduler gave last.

    Without that, nothing tells that it is of another save: users set steps, samples and schedules.
    """
    rates, entries = values.get(trainer.rates), map(optimizer.objects.get, _RATES)
    rate = next((entry.value for entry in entries if entry), None)
    return isinstance(rate, float) and isinstance(rates, list) and rate not in rates


def _schedules_in(source: Files) -> Mapping[str, Any]:
    """Return the values of accelerate's schedulers, each in a file of its own."""
    values: dict[str, Any] = {}
    for name in filter(_SCHEDULER.fullmatch, source.files):
        with suppress(CkptoolError):  # said by its own check
            leaves = read_file_leaves(source, name, prefix=(name.removesuffix(".bin"),))
            values |= {leaf_name: leaf.value for leaf_name, leaf in leaves.items()}
    return values


def _check_rates(
    catalog: Catalog, read: Mapping[str, float], values: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield a problem if no optimizer has a learning rate that its scheduler has given last.

    accelerate saves the ``values`` of schedulers in files of their own, beside DeepSpeed's folder,
    too. Users may set rates themselves, to warm up before a scheduler that counts epochs: so a
    scheduler must have given a smaller rate before its first step, or count neither the steps of
    one process nor those of all.
    """
    objects = catalog.objects.items()
    rates = {name: entry.value for name, entry in objects if _OWN_RATE.fullmatch(name)}
    schedules = {m[1]: values[name] for name in values if (m := _GIVEN_RATES.fullmatch(name))}
    odd = [name for name, last_rates in schedules.items() if _is_unused(last_rates, rates.values())]
    optimizers = {name.partition(".")[0] for name in rates}
    # with fewer or more schedulers than optimizers, any of them may give a rate
    if not odd or len(odd) < len(schedules) != len(optimizers):
        return
    steps = int(max(steps_of_each(catalog, read).values(), default=0))
    for name in odd if _FIRST <= steps < UNCOUNTED else ():
        count = number_in(values, f"{name}.last_epoch")
        if count is None or f"{name}.num_bad_epochs" in values:
            continue
        message = f"{name}.last_epoch is {count:,}, but the optimizer has taken {steps:,} steps,"
        message += " and has another learning rate than it gave"
        if count == 0:
            is_larger = max(rates.values()) > max(schedules[name])
            code = _DIFFER if is_larger else "counts-apart"
            yield Problem(f"{message}: it would begin again", code)
        elif count not in (steps, steps * (catalog.world_size or 1)) and _SLOW * count > steps:
            yield Problem(f"{message}: they are of two saves", _DIFFER)


def _is_unused(last_rates: object, rates: Collection[object]) -> bool:
    """Return whether no optimizer has a rate that a scheduler gave last, if all are numbers."""
    scheduled = last_rates if isinstance(last_rates, list) else []
    are_numbers = all(type(rate) is float for rate in (*scheduled, *rates))
    return bool(scheduled and rates) and are_numbers and {*scheduled}.isdisjoint(rates)


def _check_step(trainer: Trainer, values: Values, path: Location, step: int) -> Iterator[Problem]:
    """Yield the counts beside a step that contradict it."""
    yield from _check_counts(trainer, values, path, step)
    yield from _check_engine(trainer, values, step)
    for schedule in trainer.schedules:
        yield from _check_schedule(trainer, schedule, values, step)
    yield from _check_samples(trainer, values, step)


def _check_counts(trainer: Trainer, values: Values, path: Location, step: int) -> Iterator[Problem]:
    """Yield a problem if the step is none of the trainer's counts, or not that of the name."""
    counts = {name: n for name in trainer.counts if (n := number_in(values, name)) is not None}
    if not counts or step in counts.values():
        yield from _check_name(trainer, values, path, step)
        return
    name = max(counts, key=counts.__getitem__)
    message = f"{trainer.step} is {step:,}, but {name} is {counts[name]:,}, which a resume goes on"
    yield Problem(f"{message} from", _DIFFER)


def _check_name(trainer: Trainer, values: Values, path: Location, step: int) -> Iterator[Problem]:
    """Yield a problem if the folder is of another step; a count may begin at zero or at one.

    The folder may have been renamed, and the run's pointer changed with it, unless a scheduler
    counts the step in its name.
    """
    match = re.fullmatch(rf"(?:.*/)?({trainer.name})", f"{path.parent.name}/{path.name}")
    number = int(match["step"]) if match else step
    if match is None or abs(number - step) <= 1 or (trainer.lags and step < number):
        return
    what = "folder" if path.is_dir() else "file"
    message = f"{trainer.step} is {step:,}, but the {what} is {match[1]}"
    counts = (schedule.name for schedule in trainer.schedules)
    count = next((name for name in counts if number_in(values, name) == number), None)
    if count is not None:
        message += f", and {count} is {number:,}: they are of two saves"
        yield Problem(message, _DIFFER)
    elif trainer.pointer and _read_pointer(path.parent / trainer.pointer) == number:
        message += f", as {trainer.pointer} says: a resume goes on from {step:,}"
        yield Problem(message, "counts-apart")
    else:
        message += ": it was renamed, or its files are of another step"
        yield Problem(message, "counts-apart")


def _read_pointer(pointer: Location) -> int | None:
    """Return the number in a pointer's file, None if there is none."""
    with suppress(CkptoolError, OSError, ValueError):
        return int(read_metadata(file_at(pointer), pointer.name, _LONGEST))
    return None


def _check_engine(trainer: Trainer, values: Values, step: int) -> Iterator[Problem]:
    """Yield a problem if a trainer's engine has counted fewer steps, as of an earlier save.

    The engine may take several steps in one of the trainer's, as in TRL's PPO.
    """
    count, epochs = number_in(values, trainer.engine), values.get(trainer.epochs)
    if count is None or not isinstance(epochs, int | float):
        return
    if step - count > epochs + _FIRST:
        message = f"{trainer.engine} is {count:,}, but {trainer.step} is {step:,}"
        yield Problem(f"{message}: they are of two saves", _DIFFER)


def _check_schedule(
    trainer: Trainer, schedule: Schedule, values: Values, step: int
) -> Iterator[Problem]:
    """Yield a problem if a scheduler never stepped, or fewer times than training did.

    A scheduler that waits for a metric to grow worse steps when that is evaluated, and each of
    several schedulers has steps of its own.
    """
    count, skipped = number_in(values, schedule.name), number_in(values, trainer.skipped) or 0
    head = schedule.name.rpartition(".")[0]
    several = schedule.name.replace(".0.", ".1.")
    if several != schedule.name and several in values:
        yield from _check_schedulers(schedule, values, step)
        return
    if count is None or f"{head}.num_bad_epochs" in values:
        return
    if schedule.rate and not _has_stepped(schedule, head, values):
        return
    calls = (number_in(values, f"{head}._step_count") or 0) - 1
    if 0 < calls < step and _gave_another_rate(schedule, head, values):
        message = f"{head} has stepped {calls:,} times, but {trainer.step} is {step:,}, and the"
        message += " optimizer has another learning rate than it gave: they are of two saves"
        yield Problem(message, _DIFFER)
        return
    steps, counted = step - skipped, count - schedule.begin
    may_skip = schedule.scaled and values.get(schedule.scaled) is not False
    may_wait = trainer.epochs and not _is_in_second(values.get(trainer.epochs))
    if counted == 0 and not may_wait and steps >= (_SCALINGS if may_skip else _FIRST):
        message = f"{schedule.name} is {count:,}, as before the first step, but {trainer.step} is"
        yield Problem(f"{message} {step:,}: the learning rate would begin again", _DIFFER)
    elif schedule.of_steps and 0 < counted < steps:
        message = f"{schedule.name} has counted {counted:,} of {steps:,} steps: learning rates"
        yield Problem(f"{message} were begun again, or left out of a load", "counts-apart")


def _check_schedulers(schedule: Schedule, values: Values, step: int) -> Iterator[Problem]:
    """Yield a problem if several schedulers together have stepped fewer times than training."""
    pattern = re.compile(rf"({re.escape(schedule.name.partition('.0.')[0])}\.\d+)\..+")
    heads = dict.fromkeys(match[1] for match in map(pattern.fullmatch, values) if match)
    calls = {head: number_in(values, f"{head}._step_count") for head in heads}
    steps = {head: number - 1 for head, number in calls.items() if number is not None}
    if len(steps) == len(heads) and sum(steps.values()) < step:
        yield _fewer_than_all(steps, step, "schedulers")


def _has_stepped(schedule: Schedule, scheduler: str, values: Values) -> bool:
    """Return whether a scheduler has stepped, or gave another learning rate than there is."""
    steps = number_in(values, f"{scheduler}._step_count") or 0
    is_later = steps > _FIRST and values.get(schedule.epoch) != 0
    return is_later or _gave_another_rate(schedule, scheduler, values)


def _gave_another_rate(schedule: Schedule, scheduler: str, values: Values) -> bool:
    rates, rate = values.get(f"{scheduler}._last_lr"), values.get(schedule.rate)
    return isinstance(rates, list) and rate is not None and rate not in rates


def _is_in_second(epochs: object) -> bool:
    """Return whether the first epoch ended before the last step: a save may precede its end."""
    return isinstance(epochs, int | float) and epochs > 1


def _check_samples(trainer: Trainer, values: Values, step: int) -> Iterator[Problem]:
    """Yield a problem if samples are fewer than steps, or not a constant batch for each step."""
    samples, batch = number_in(values, trainer.samples), number_in(values, trainer.batch)
    if not samples or samples < 0:
        return  # older versions did not count them
    is_constant = values.get(trainer.growth, "") is None
    if samples < step:
        message = f"{trainer.samples} is {samples:,}, but {trainer.step} is {step:,}: fewer than"
        yield Problem(f"{message} one a step", _DIFFER)
    elif batch and is_constant and samples != step * batch:
        message = f"{trainer.samples} is {samples:,}, but {step:,} steps of {batch:,} are"
        message += f" {step * batch:,}: the batch was changed, or data was left out"
        yield Problem(message, "counts-apart")
