"""Whether the files of a save are those of two, as an earlier save of its run tells.

Training moves weights and what an optimizer keeps of them together. If one of the two is, bit for
bit, that of an earlier save and the other is not, they are of two. Much may rightly stand still:
what is frozen or learns too slowly to be seen, an average, and a model that the optimizer beside it
is not of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath

from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.models import Found, as_read
from ckptool.commands.runs.steps import Step
from ckptool.commands.verify.checks.content import located
from ckptool.commands.verify.checks.meaning.counts import steps_of_each
from ckptool.commands.verify.checks.meaning.trainer_counts import number_in
from ckptool.commands.verify.checks.optimizer_names import Group, groups_of
from ckptool.commands.verify.checks.training import StepCounters
from ckptool.commands.verify.compare.matrices import Save, saves_in
from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.core.text import list_some, natural_key
from ckptool.errors import CkptoolError, Problem

_DIFFER = "counts-differ"
_BEFORE = 3
"""How many of the steps before it a step is compared with."""
_FEW = 2
_COUNT = re.compile(r"scheduler(?:_\d+)?\.last_epoch")
"""What accelerate saves of a scheduler."""


def earlier_problems(
    step: Step, found: Iterable[Found], earlier: Sequence[Step], options: ReadOptions
) -> Iterator[Problem]:
    """Yield what in a step is of one of the ``earlier`` ones, though not all of it, or was lost.

    It has been ``found`` in the step's checkpoints, and in models inside them. Raises NoAnswer.
    """
    own = saves_in(step, found)
    inner = [at for at, save in own.items() if save.inside]
    steps = reversed(earlier[-_BEFORE:])
    others = [saves_in(each, _found_in(each, inner, options)) for each in steps]
    for at, save in own.items():
        before = [saves[at] for saves in others if at in saves]
        if not save.inside:
            for was in before:
                why = _reset_scheduler(save, was) or _mixed_with(save, was)
                yield from [Problem(why, _DIFFER)] if why else []
                yield from _lost_state(save, was) if was.step is earlier[-1] else ()
            yield from _emptied(save, before)
        for each in _moved_strangely(save, before) if before else ():
            yield Problem(f"{at}: {each}", each.code) if save.inside else each


def _found_in(step: Step, inner: Iterable[PurePath], options: ReadOptions) -> Iterator[Found]:
    """Yield what is readable of a step's checkpoints, and at places inside. Raises NoAnswer."""
    places = [(False, part) for part in step.parts]
    places += [(True, step.path.joinpath(*at.parts)) for at in inner]
    for inside, place in places:
        survey = survey_readable(place, as_read(options, inside))
        if survey is not None:
            yield inside, survey


def _moved_strangely(save: Save, before: Sequence[Save]) -> Iterator[Problem]:
    from ckptool.commands.verify.compare.movement import movement_problems  # numpy

    return movement_problems(save, before)


def _lost_state(save: Save, was: Save) -> Iterator[Problem]:
    """Yield a problem if an optimizer lacks state of parameters, which it had some steps before.

    If it was begun again it has taken fewer steps, or where it has no state at all, so have others.
    """
    one, other = save.optimizer, was.optimizer
    if not one or not other or not one.catalog or not other.catalog:
        return
    mine, before = _with_state(one.catalog), _with_state(other.catalog)
    if mine.keys() != before.keys() or all(mine[each] >= before[each] for each in mine):
        return
    taken, taken_before = _steps_taken(one), _steps_taken(other)
    moved = {each for each, steps in taken.items() if steps > taken_before.get(each, steps)}
    for group, own in mine.items():
        is_adam = f"{group.head}.betas" in one.catalog.objects  # has moments of all that it steps
        is_whole = group.optimizer not in taken and is_adam and moved
        lost = sorted(before[group] - own, key=natural_key)
        if lost and (group.optimizer in moved or is_whole):
            message = f"{list_some(lost, _FEW)}: without optimizer state, which {was.name} has"
            yield Problem(message, "optimizer-incomplete")


def _with_state(optimizer: Catalog) -> Mapping[Group, set[str]]:
    """Return what the names of state begin with in each group of parameters."""
    heads = {name.rpartition(".")[0] for name in optimizer.tensors}
    named = (
        each._replace(parameters=(*map(str, each.parameters),)) for each in groups_of(optimizer)
    )
    return {each: heads.intersection(map(each.state_of, each.parameters)) for each in named}


def _emptied(save: Save, before: Sequence[Save]) -> Iterator[Problem]:
    """Yield a problem if momentum that counts no steps is all zero, unlike that of a save before.

    Once there was a gradient it is not, unless none comes for hundreds of steps.
    """
    momenta = save.momenta
    if not momenta.entries or not momenta.are_zero:
        return
    for was in before:
        if was.momenta.entries and not was.momenta.are_zero:
            message = f"{next(iter(momenta.entries))}: all momentum is zero, but not in {was.name}"
            yield Problem(f"{message}: a resume begins it again", "moments-zero")
            return


def _reset_scheduler(save: Save, was: Save) -> str | None:
    """Return which scheduler of accelerate has not stepped, unlike one that did at each step."""
    surveys = save.survey, was.survey
    values, before = ({n: e.value for n, e in _values(each)} for each in surveys)
    for count in filter(_COUNT.fullmatch, values):
        steps = number_in(before, count) or 0
        if values[count] != 0 or not steps:
            continue
        taken, taken_before = (max(_steps_taken(each).values(), default=0) for each in surveys)
        if 0 < taken_before <= steps and taken_before < taken:
            message = (
                f"{count} is 0, but {steps:,} in {was.name}, after which the optimizer has taken"
            )
            return f"{message} more steps: the learning rate would begin again"
    return None


def _values(save: Survey) -> Iterable[tuple[str, ObjectEntry]]:
    return save.catalog.objects.items() if save.catalog else ()


def _steps_taken(save: Survey) -> Mapping[str, float]:
    """Return how many steps each optimizer has taken, as far as they are counted."""
    counters, catalog = StepCounters(), save.catalog
    if catalog is None:
        return {}
    numbers = catalog.with_tensors({n: e for n, e in catalog.tensors.items() if e.elements == 1})
    with suppress(CkptoolError):  # said by the check of the save by itself
        opened = located(save.format, save.source, numbers, lambda item: True)[0]
        counters.read(opened.values(), save.source, announced=False)
    return steps_of_each(catalog, counters.taken)


def _mixed_with(save: Save, was: Save) -> str | None:
    """Return what a save alone has of an earlier one, if that is its model or its optimizer.

    Little is read, unless something is the same: the smallest matrices first, and of each what
    precedes the first difference.
    """
    weights, weights_before = save.weights, was.weights
    one, other = save.optimizer, was.optimizer
    if not one or not other or weights.looks != weights_before.looks or weights.are_averages:
        return None
    state, state_before = save.state, was.state
    if state.looks != state_before.looks or not state.are_of(weights):
        return None
    has_weights = weights.are_those_of(weights_before)
    has_state = state.are_those_of(state_before)
    if has_weights and not has_state and weights.are_moved_by(save.least_step(was)):
        return f"its weights are those of {was.name}, but not its optimizer: they are of two saves"
    if has_state and not has_weights and not state.are_zero:
        return f"its optimizer is that of {was.name}, but not its weights: they are of two saves"
    return None
