"""Whether the files of a save are of two saves, as an earlier save of its run tells.

Training moves weights and the state that an optimizer keeps of them together. If one of the two is,
bit for bit, that of an earlier save and the other is not, they are of two saves. So are counts that
went together until the last save, of which one is that of it. Much may rightly stand still: weights
that are frozen or learn too slowly to be seen, an average, and a model beside the optimizer of
another.
"""

from __future__ import annotations

import re
from collections import ChainMap, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import PurePath

from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.models import StepSurvey, survey_models
from ckptool.commands.runs.steps import Step
from ckptool.commands.verify.checks.meaning.trainer_counts import TRAINERS, number_in
from ckptool.commands.verify.checks.optimizer_names import Group, flat_groups_of, groups_of
from ckptool.commands.verify.history.counted import old_counts
from ckptool.commands.verify.history.matrices import ADAPTER
from ckptool.commands.verify.history.saves import Save, saves_in
from ckptool.core.catalog import Catalog
from ckptool.core.text import list_some, natural_key
from ckptool.errors import Problem
from ckptool.storage.url import Location

_DIFFER = "counts-differ"
_BEFORE = 3
"""How many of the steps before it a step is compared with, beside the first one of all."""
_BY_TURNS = 2
"""How many series have the saves in memory that their steps are compared with."""
_FEW = 2
_EXCHANGED = "it counts {:,}, and {} counts {:,}: they were exchanged"
_COUNT = re.compile(r"scheduler(?:_\d+)?\.last_epoch")
"""What accelerate saves of a scheduler."""
_LEFT = re.compile(r"(?i)remain|left|until|patience|cooldown|countdown")
"""In the names of what counts down."""


class History:
    """Compares each step of a run with those before it, whose saves it reads once.

    Steps are assessed from the newest, so only the saves that were last compared are remembered:
    two series may be assessed by turns.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._compared = deque[dict[Location, Mapping[PurePath, Save]]](maxlen=_BY_TURNS)
        self._recorded = defaultdict[object, set[int]](set)
        """The numbers in the names of each series' later steps that these steps also record."""
        self._told: dict[tuple[Location, PurePath], str] = {}
        """What is wrong with earlier saves, as later ones tell."""

    def problems(
        self, step: Step, checkpoints: Iterable[StepSurvey], earlier: Sequence[Step]
    ) -> Iterator[Problem]:
        """Yield what of a step's checkpoints is of ``earlier`` steps, or was lost since.

        The checkpoints are those of the step and the models inside them. Raises NoAnswer.
        """
        if not earlier:
            return
        from ckptool.commands.verify.history.movement import movement_problems  # numpy
        from ckptool.commands.verify.history.shard_files import shard_file_problems

        saves = self._saves_of(step, checkpoints)
        number, recorded = step.number or 0, self._recorded[step.series]
        newer = {other for other in recorded if other > number}
        recorded.update(n for s in saves.values() for n in s.recorded.values() if n == number)
        chosen = [*earlier[:-_BEFORE][:1], *earlier[-_BEFORE:]]
        past = {old.path: self._saves_of(old, survey_models(old, self._options)) for old in chosen}
        self._compared.append(past)
        for place, save in saves.items():
            olds = [old for old in reversed(past.values()) if place in old]
            if len(olds) > _BEFORE and olds[-1][place].weights.looks != save.weights.looks:
                olds.pop()  # a model that has grown since the first one of all
            predecessors = [old[place] for old in olds]
            if not predecessors:
                continue
            have_state = (o for o in predecessors if _has_lent_state(save, o, predecessors))
            lent = {old.step.path for old in have_state}
            crossed = self._crossed(save, place, predecessors, lent)
            yield from (Problem(message, _DIFFER) for message in crossed[:1])
            if save.inside:
                own = _left_behind(save, place, [saves, *olds])
            else:
                own = _save_problems(save, predecessors, lent, earlier[-1], newer)
            moved = movement_problems(save, predecessors)
            for problem in chain(own, shard_file_problems(save, predecessors), moved):
                yield Problem(f"{save.part}: {problem}", problem.code) if save.part else problem

    def _crossed(
        self, save: Save, place: PurePath, predecessors: Sequence[Save], lent: Set[Location]
    ) -> Sequence[str]:
        """Return how a save was mixed up with one before or after it, and remember it of these.

        Its optimizer was ``lent`` to the steps at these places.
        """
        key = save.step.path, place
        found = [self._told[key]] if key in self._told else []
        for old in predecessors:
            old_key = old.step.path, place
            if old.step.path in lent:
                message = f"its optimizer is that of {save.name}, which is newer, but not its"
                self._told[old_key] = f"{message} weights: they are of two saves"
            elif _are_exchanged(save, old):
                number, old_number = save.step.number, old.step.number
                found.append(_EXCHANGED.format(old_number, old.name, number))
                self._told[old_key] = _EXCHANGED.format(number, save.name, old_number)
        return found

    def _saves_of(self, step: Step, checkpoints: Iterable[StepSurvey]) -> Mapping[PurePath, Save]:
        """Return the saves of a step, those of its checkpoints unless it is remembered."""
        return ChainMap(*self._compared).get(step.path) or saves_in(step, checkpoints)


def _left_behind(
    adapter: Save, place: PurePath, steps: Sequence[Mapping[PurePath, Save]]
) -> Iterator[Problem]:
    """Yield a problem if an adapter inside a step is that of one before it, unlike the model.

    A trainer that saves both has merged the adapter into the model, as torchtune does. ``steps``
    have this one's saves, and those of the steps before it: in one, the adapter was another.
    """
    weights = adapter.weights
    if not weights.entries or not all(ADAPTER in name.lower() for name in weights.entries):
        return
    models = [next((s.weights for s in saves.values() if not s.inside), None) for saves in steps]
    olds = [(saves[place], model) for saves, model in zip(steps, models, strict=True)][1:]
    olds = [pair for pair in olds if pair[0].weights.looks == weights.looks]
    same = [pair for pair in olds if weights.are_equal_to(pair[0].weights)]
    if not 0 < len(same) < len(olds):
        return
    model, (old, old_model) = models[0], same[0]
    if model and old_model and model.looks == old_model.looks and not model.are_equal_to(old_model):
        message = f"its weights are those of {old.name}, but not those of the model beside it"
        yield Problem(f"{message}: they are of two saves", _DIFFER)


def _save_problems(
    save: Save,
    predecessors: Sequence[Save],
    lent: Set[Location],
    last: Step,
    newer: Collection[int],
) -> Iterator[Problem]:
    """Yield what a save lacks or shares of its predecessors; of the ``last`` step, lost state.

    Its optimizer was ``lent`` to the steps at these places. ``newer`` steps are those after it that
    record the number in their name.
    """
    yield from _copies(save, predecessors[:_BEFORE], newer)
    for predecessor in predecessors:
        cause = _scheduler_reset(save, predecessor)
        if cause is None and predecessor.step.path not in lent:
            cause = _mixed_with(save, predecessor)
        yield from [Problem(cause, _DIFFER)] if cause else []
        yield from _lost_state(save, predecessor) if predecessor.step is last else ()
    yield from _zero_momentum(save, predecessors[:_BEFORE])
    yield from old_counts(save, *predecessors[:2]) if len(predecessors) > 1 else ()


def _copies(save: Save, predecessors: Sequence[Save], newer: Collection[int]) -> Iterator[Problem]:
    """Yield a problem if a save is a predecessor's, and records its step or epoch, not its own.

    All predecessors record those in their names, as other steps do, or these may count something
    else. A loop may save its end once more, under a number that is next to it, and may go on later.
    """
    number, olds = save.step.number, [(old.step.number, old) for old in predecessors]
    numbers = sorted({n for n, _ in olds if n is not None})
    names = [c for c in save.recorded if all(n == old.recorded.get(c, -1) for n, old in olds)]
    counts = {save.recorded[name] for name in names}
    if number is None or number in counts or not counts:
        return
    spaced = numbers if len(numbers) > 1 else sorted({*numbers, *newer})
    least = 1 if newer else 2
    if len(spaced) < 2 or number - numbers[-1] < max(least, spaced[-1] - spaced[-2]):
        return
    for old in (old for n, old in olds if n in counts):
        pairs = [(save.weights, old.weights), (save.state, old.state)]
        are_same = all(now.looks == then.looks for now, then in pairs)
        if are_same and all(now.are_equal_to(then) for now, then in pairs):
            message = f"its weights, its optimizer and what it counts are those of {old.name}"
            yield Problem(f"{message}: it is a copy", _DIFFER)


def _lost_state(save: Save, predecessor: Save) -> Iterator[Problem]:
    """Yield a problem if an optimizer lacks state of parameters of which its predecessor had some.

    An optimizer that was begun again has taken fewer steps, so it is not meant. If it has no state,
    and so no steps, the steps of the save's other optimizers tell.
    """
    one, other = save.optimizer, predecessor.optimizer
    if not one or not other or not one.catalog or not other.catalog:
        return
    states, old_states = _states_by_group(one.catalog), _states_by_group(other.catalog)
    if states.keys() != old_states.keys() or all(states[g] >= old_states[g] for g in states):
        return
    steps, old_steps = save.steps_taken, predecessor.steps_taken
    moved = {name for name, count in steps.items() if count > old_steps.get(name, count)}
    for group, names in states.items():
        is_adam = f"{group.head}.betas" in one.catalog.objects  # has moments of all that it steps
        is_whole = group.optimizer not in steps and is_adam and moved
        gaps = sorted(old_states[group] - names, key=natural_key)
        if gaps and (group.optimizer in moved or is_whole):
            message = f"{list_some(gaps, _FEW)}: without optimizer state, which {predecessor.name}"
            yield Problem(f"{message} has", "optimizer-incomplete")


def _states_by_group(optimizer: Catalog) -> Mapping[Group, set[str]]:
    """Return which parameters of each group have state, by the beginning of the state's names."""
    heads = {name.rpartition(".")[0] for name in optimizer.tensors}
    found = chain(groups_of(optimizer), flat_groups_of(optimizer))
    groups = (group._replace(parameters=(*map(str, group.parameters),)) for group in found)
    return {group: heads.intersection(map(group.state_of, group.parameters)) for group in groups}


def _zero_momentum(save: Save, predecessors: Sequence[Save]) -> Iterator[Problem]:
    """Yield a problem if momentum that counts no steps is all zero, unlike a predecessor's.

    Once there was a gradient it is not, unless none comes for hundreds of steps.
    """
    momenta = save.momenta
    if not momenta.entries or not momenta.are_zero:
        return
    for old in predecessors:
        momentum = old.state.only(momenta.entries.keys() & old.state.entries.keys())
        if momentum.entries and not momentum.are_zero:
            message = f"{next(iter(momenta.entries))}: all momentum is zero, but not in {old.name}"
            yield Problem(f"{message}: a resume begins it again", "moments-zero")
            return


def _scheduler_reset(save: Save, predecessor: Save) -> str | None:
    """Return how a scheduler of accelerate was reset: it has no steps, and had the optimizer's."""
    if any(item.optimizer is not item.survey for item in (save, predecessor)):
        return None
    values, old_values = save.values, predecessor.values
    for count in filter(_COUNT.fullmatch, values):
        steps = number_in(old_values, count) or 0
        if values[count] != 0 or not steps:
            continue
        total, old_total = save.most_steps_taken, predecessor.most_steps_taken
        if 0 < old_total <= steps and old_total < total:
            message = f"{count} is 0, but {steps:,} in {predecessor.name}, after which the"
            message += " optimizer has taken more steps"
            return f"{message}: the learning rate would begin again"
    return None


def _mixed_with(save: Save, predecessor: Save) -> str | None:
    """Return that a save has its predecessor's model without the optimizer, or the reverse.

    Little is read, unless something is the same: the smallest matrices first, and of each what
    precedes the first difference.
    """
    weights, old_weights, name = save.weights, predecessor.weights, predecessor.name
    one, other = save.optimizer, predecessor.optimizer
    if not one or not other or weights.looks != old_weights.looks or save.has_averages:
        return None
    state, old_state = save.state, predecessor.state
    if state.looks != old_state.looks or not state.may_be_state_of(weights):
        return None
    has_weights = weights.are_equal_to(old_weights)
    has_state = state.are_equal_to(old_state)
    more = _more_steps(save, predecessor) if has_weights and has_state else None
    if more and not state.are_zero:
        cause = f"its weights and its optimizer are those of {name}, but {more}"
    elif has_weights and not has_state and save.moves(predecessor, weights.entries):
        if save.has_resting_optimizer(predecessor):
            return None
        cause = f"its weights are those of {name}, but not its optimizer"
    elif has_state and not (has_weights or state.are_zero) and save.has_rows_of(predecessor):
        cause = f"its optimizer is that of {name}, but not its weights"
    else:
        return None
    return f"{cause}: they are of two saves"


def _has_lent_state(save: Save, old: Save, predecessors: Sequence[Save]) -> bool:
    """Return whether an earlier save has this one's optimizer, by the steps that it has taken.

    They lie as far from the number in this one's name as those of the other predecessors do.
    """
    offsets = {_steps_before(other) for other in predecessors if other is not old}
    is_own = offsets == {_steps_before(save)} != {_steps_before(old)}
    state, old_state = save.state, old.state
    return is_own and state.looks == old_state.looks and state.are_equal_to(old_state)


def _are_exchanged(save: Save, old: Save) -> bool:
    """Return whether each of two saves counts the number in the other one's name, not its own.

    If the later one's optimizer has taken more steps, they are in order: what counts down is meant.
    """
    numbers = save.step.number, old.step.number
    if numbers[0] in save.recorded.values() or numbers[1] in old.recorded.values():
        return False
    if save.most_steps_taken > old.most_steps_taken > 0:
        return False
    counts = ((name, n) for name, n in save.recorded.items() if not _LEFT.search(name))
    return any((old.recorded.get(name), n) == numbers for name, n in counts)


def _steps_before(save: Save) -> float | None:
    """Return how many more steps the name counts than an optimizer has taken; None if either."""
    number, taken = save.step.number, save.most_steps_taken
    return number - taken if number is not None and taken else None


def _more_steps(save: Save, predecessor: Save) -> str | None:
    """Return which count is higher than a predecessor's, if its trainer counts the steps taken.

    Those that it skips are counted, too, or there are none. Other trainers may have taken none
    since, as loss scaling skips all that are not finite. An optimizer that has taken more trains
    what is no matrix, such as biases.
    """
    if save.most_steps_taken > predecessor.most_steps_taken:
        return None
    for trainer in TRAINERS:
        more = save.counts.get(trainer.step, 0) - predecessor.counts.get(trainer.step, 0)
        counts_taken = trainer.skipped or trainer.stepped == trainer.step
        if counts_taken and trainer.step in predecessor.counts and more > 0:
            return f"{trainer.step} counts {more:,} steps more"
    return None
