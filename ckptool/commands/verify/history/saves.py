"""One save of a run: what it has of a model, and of the optimizer in it or beside it."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import PurePath

from msgspec import Struct

from ckptool.commands.inspect.records import simple_value
from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.contents import AT_ONCE
from ckptool.commands.runs.models import StepSurvey
from ckptool.commands.runs.names import parse_name
from ckptool.commands.runs.records import recorded_counts
from ckptool.commands.runs.steps import Step
from ckptool.commands.verify.checks.content import locate_numbers, locate_whole
from ckptool.commands.verify.checks.meaning.counts import UNCOUNTED, steps_of_each
from ckptool.commands.verify.checks.meaning.numbered import weight_of_each
from ckptool.commands.verify.checks.meaning.stacks import Index, is_matrix
from ckptool.commands.verify.checks.meaning.trainer_counts import number_in, trainers_of
from ckptool.commands.verify.checks.measures import (
    count_moved,
    half_reaches,
    largest_sizes,
)
from ckptool.commands.verify.checks.optimizer_names import MOMENTUM, RATE, StateName
from ckptool.commands.verify.checks.training import StepCounters
from ckptool.commands.verify.history.matrices import (
    SEEN,
    SQUARES,
    VISIBLE,
    Matrices,
    matrices_of,
)
from ckptool.core.catalog import ObjectEntry
from ckptool.core.state_category import AVERAGE, without_averages
from ckptool.errors import CkptoolError
from ckptool.formats.companions import trainer_optimizer
from ckptool.serialization.file_roles import role_of, without_words
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.state_dict.leaves import read_file_leaves
from ckptool.storage.url import Location, within

_MEANS = frozenset(["exp_avg", MOMENTUM])
_OF_TORCH = (".pt", ".pth", ".bin")
_LARGEST = 1e-3
"""How much of a gradient counts at most for a step that is not divided by its size."""


class Save(Struct, frozen=True, dict=True):
    """A checkpoint of a step, or a model ``inside`` one, with the optimizer that trains it.

    It is an ``entry`` of the step, or lies in one; ``part`` is the role of that entry, if the step
    has several, and the path of a model in it. ``optimizer_part`` is the step's only checkpoint
    with an optimizer, if this is its only model, or the only one whose name says the same.
    ``others`` are files beside the step's first one, unless they are of ranks.
    """

    survey: Survey
    step: Step
    entry: Location
    part: str = ""
    inside: bool = False
    optimizer_part: Survey | None = None
    others: tuple[Survey, ...] = ()

    @property
    def name(self) -> str:
        """The name of the step, as its entry has it."""
        return self.entry.name

    def was_written_after(self, other: Save) -> bool:
        """Return whether its weights were clearly written after those of another save."""
        times = [
            max((save.survey.source.modified(file) for file in save.weights.files), default=0.0)
            for save in (self, other)
        ]
        return times[0] - times[1] > AT_ONCE

    @cached_property
    def optimizer(self) -> Survey | None:
        """The checkpoint with the optimizer: this one, the step's only one, or a file beside it."""
        catalog, source = self.survey.catalog, self.survey.source
        if catalog is None:
            return None
        file = trainer_optimizer(source.files, catalog.files)
        if not file:
            return self.optimizer_part or self.survey
        return survey_readable(self.survey.path / file, ReadOptions("torch-save"))

    @cached_property
    def weights(self) -> Matrices:
        """The matrices of the model, without averages of them."""
        matrices = matrices_of(self.survey, "model")
        return matrices.only(without_averages(matrices.entries))

    @cached_property
    def state(self) -> Matrices:
        """The matrices of the optimizer."""
        return matrices_of(self.optimizer or self.survey, "optimizer")

    @property
    def has_averages(self) -> bool:
        """Whether the name of a file, or of a folder from the step's on, says so of its weights."""
        folders = self.name, *within(self.survey.path, self.entry).parts
        return any(map(AVERAGE.search, (*folders, *self.weights.files)))

    def has_rows_of(self, predecessor: Save) -> bool:
        """Return whether what the optimizer has beside matrices is that of an earlier save.

        Some keep their moments as rows, beside matrices that stay the same: masks, projections.
        """
        rows, old_rows = (
            matrices_of(save.optimizer or save.survey, "optimizer", _is_row)
            for save in (self, predecessor)
        )
        return rows.looks == old_rows.looks and rows.are_equal_to(old_rows)

    @cached_property
    def squares(self) -> Matrices:
        """The means of squares of matrices, which steps are divided by, but for those in codes."""
        entries = self.state.entries
        squares = (name for name in entries if StateName.of(name).kind in SQUARES)
        return self.state.only(n for n in squares if entries[n].source_dtype.kind == "float")

    def has_resting_optimizer(self, predecessor: Save) -> bool:
        """Return whether one of several optimizers of all weights has a predecessor's state.

        It may be the one that moves what is saved, as the outer one of DiLoCo.
        """
        groups: dict[str, list[str]] = {}
        for name in self.state.entries:
            groups.setdefault(StateName.of(name).optimizer, []).append(name)
        states = [self.state.only(names) for names in groups.values()]
        states = [state for state in states if state.may_be_state_of(self.weights)]
        return len(states) > 1 and any(s.are_equal_to(predecessor.state) for s in states)

    @cached_property
    def momenta(self) -> Matrices:
        """The momentum of each matrix, of optimizers that count no steps or have taken none."""
        kinds = {MOMENTUM} if any(self.steps_taken.values()) else _MEANS
        names = self.state.entries
        return self.state.only(name for name in names if StateName.of(name).kind in kinds)

    @cached_property
    def values(self) -> Mapping[str, object]:
        """Its values that are no tensors, by their names, and those of schedulers beside it."""
        catalog = self.survey.catalog
        own = {name: entry.value for name, entry in catalog.objects.items()} if catalog else {}
        return {**self._schedules_inside, **self._schedules_beside, **own}

    @property
    def _schedules_beside(self) -> Mapping[str, object]:
        """The values of schedulers in files beside it, after the kind of these."""
        files = ((kind_of(o.path), o.catalog) for o in self.others if _is_schedule(o.path.name))
        pairs = ((kind, catalog.objects) for kind, catalog in files if catalog)
        return {f"{kind}.{n}": e.value for kind, objects in pairs for n, e in objects.items()}

    @property
    def _schedules_inside(self) -> Mapping[str, object]:
        """The values of schedulers in files that no checkpoint of its folder is read from."""
        source, catalog = self.survey.source, self.survey.catalog
        read = catalog.files if catalog else ()
        values: dict[str, object] = {}
        for file in filter(_is_schedule, source.files.keys() - read):
            with suppress(CkptoolError):  # said by its own check
                leaves = read_file_leaves(source, file, prefix=(file,))
                values |= {name: leaf.value for name, leaf in leaves.items()}
        return values

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The steps that a trainer counts, without those it skipped, and what it steps counts.

        With schedulers that count samples, also the samples.
        """
        counts: dict[str, int] = {}
        catalog = self.survey.catalog
        for trainer, step, values in trainers_of(self.survey, catalog) if catalog else ():
            if not trainer.counts_training:
                continue
            counts[trainer.step] = step - (number_in(values, trainer.skipped) or 0)
            for schedule in trainer.schedules:
                count = number_in(values, schedule.name)
                samples = number_in(values, trainer.samples) if schedule.of_samples else None
                if (schedule.of_steps or samples is not None) and count is not None:
                    counts[schedule.name] = count - schedule.begin
                if samples is not None:
                    counts[trainer.samples] = samples
        return {name: count for name, count in counts.items() if count < UNCOUNTED}

    @cached_property
    def recorded(self) -> Mapping[str, int]:
        """What its values and its trainer's record count, by names."""
        catalog = self.survey.catalog
        return {**(recorded_counts(catalog) if catalog else {}), **self.counts}

    @cached_property
    def steps_taken(self) -> Mapping[str, float]:
        """How many steps each optimizer has taken, as far as they are counted."""
        counters, survey = StepCounters(), self.optimizer or self.survey
        if survey.catalog is None:
            return {}
        counters.read(locate_numbers(survey).values(), survey.source, announced=False)
        return steps_of_each(survey.catalog, counters.taken)

    @property
    def most_steps_taken(self) -> float:
        """The most steps that an optimizer has taken, of those that were counted one by one."""
        counts = self.steps_taken.values()
        return max((count for count in counts if count < UNCOUNTED), default=0)

    @property
    def optimizer_values(self) -> Mapping[str, ObjectEntry]:
        """The values of the optimizer that are no tensors, by their names."""
        survey = self.optimizer
        return survey.catalog.objects if survey is not None and survey.catalog is not None else {}

    @cached_property
    def rates(self) -> list[float]:
        """The learning rates of the optimizer that are finite numbers, or tensors of one."""
        survey = self.optimizer
        if survey is None or survey.catalog is None:
            return []
        values = (e.value for n, e in self.optimizer_values.items() if RATE.fullmatch(n))
        values = (simple_value(v) if isinstance(v, Call) else v for v in values)  # as numpy gives
        rates = [value for value in values if type(value) in (int, float)]
        tensors = (n for n, e in survey.catalog.tensors.items() if e.elements == 1)
        entries = locate_whole(survey, filter(RATE.fullmatch, tensors)).values()
        rates += largest_sizes(entries, survey.source).values()
        return [float(rate) for rate in rates if abs(rate) <= sys.float_info.max]

    def least_step(self, predecessor: Save) -> float:
        """Return the size of a step between two saves, 0 if it may be too small to be seen.

        A save has the rate of the step that follows it, which is zero once training is over.
        """
        first, last = (max(save.rates, default=0.0) for save in (predecessor, self))
        # gradients that are not divided by their sizes are taken for a ten-thousandth
        step = min(first, last or first) * VISIBLE / self.state.visible_rate
        return step if step >= VISIBLE else 0.0

    def moves(self, predecessor: Save, weights: Iterable[str]) -> bool:
        """Return whether a step since an earlier save must change some weights, once rounded.

        Without any means of squares no step was taken: AdaShift begins with later gradients.
        """
        if self.squares.entries and self.squares.are_zero:
            return False
        matrices = self.weights.only(weights)
        if matrices.are_moved_by(self.least_step(predecessor)):
            return True
        rate = self._least_rate(predecessor)
        pairs = ((name, self._means.get(name)) for name in matrices.entries if rate)
        return any(mean and self._is_moved_by(mean, name, rate) for name, mean in pairs)

    def _least_rate(self, predecessor: Save) -> float:
        """Return the least learning rate of any group between two saves whose steps are not scaled.

        At the end of training, all may be zero.
        """
        if self.state.visible_rate == VISIBLE or self.has_frozen_group(predecessor):
            return 0.0
        rates = [min(save.rates, default=0.0) for save in (predecessor, self)]
        return max(min(filter(None, rates), default=0.0), 0.0)

    def _is_moved_by(self, mean: str, weight: str, rate: float) -> bool:
        """Return whether a step by a mean of gradients changes a weight, once rounded.

        Half of a matrix moves that far. If more than half of it would change, some of it does. A
        step that is the sign of the mean, or orthogonal as Muon's, is no smaller than ``_LARGEST``.
        """
        momentum, matrix = self.state.opened(mean), self.weights.opened(weight)
        if momentum is None or matrix is None:
            return False
        size = min(half_reaches(momentum, self.state.survey.source), _LARGEST)
        count = count_moved([matrix], self.weights.survey.source, rate * size)
        return count >= matrix.elements / 2 + SEEN

    def has_frozen_group(self, predecessor: Save) -> bool:
        """Return whether a group's learning rate is zero, other than all at the end of training."""
        return 0 in predecessor.rates or (0 in self.rates and any(self.rates))

    @cached_property
    def _means(self) -> Mapping[str, str]:
        """The names of the means of gradients, by the names of their weights."""
        weights = weight_of_each(self.state.entries, self.weights.entries)
        return {of: name for name, of in weights.items() if StateName.of(name).kind in _MEANS}

    def may_be_trained(self, weight: str) -> bool:
        """Return whether the optimizer has state of a weight, or names none, so that it may."""
        return weight in self._means or not self._means

    def state_moved(self, predecessor: Save, weight: str) -> bool | None:
        """Return whether the state of a weight is other than in an earlier save; None if unknown.

        If parameters have numbers alone, it may be that of another matrix of its shape and layer.
        """
        name = self._means.get(weight)
        if name is None or predecessor._means.get(weight) != name:
            return None
        return not self.state.only([name]).are_equal_to(predecessor.state)


def kind_of(place: Location) -> str:
    """Return the name of a file without its numbers, as other steps have it."""
    return parse_name(place.name, is_folder=False).kind


def _is_schedule(file: str) -> bool:
    return "/" not in file and file.endswith(_OF_TORCH) and role_of(file) == "scheduler"


def saves_in(step: Step, checkpoints: Iterable[StepSurvey]) -> Mapping[PurePath, Save]:
    """Return the saves of a step's checkpoints, and of models in them, by their places in it.

    Beside a step's first entry, those are that have an optimizer of their own, but for files of
    other ranks. A model inside one that has no weights itself is what its optimizer trains, as of
    diffusers' scripts.
    """
    surveys = [*checkpoints]
    outermost = [survey for inside, survey in surveys if not inside]
    parts = [_Part(survey) for survey in outermost]
    holds_models = not any(part.shapes for part in parts)
    parts = [_Part(survey) for _, survey in surveys] if holds_models else parts
    beside = (survey for survey in outermost if survey.path in step.beside)
    others = tuple(survey for survey in beside if not step.is_of_rank(survey.path))
    saves: dict[PurePath, Save] = {}
    for inside, survey in surveys:
        state, places = _optimizer_of(survey, parts), {survey.path, *survey.path.parents}
        for entry in (entry for entry in step.entries if entry in places):
            name, inner = parse_name(entry.name, is_folder=False), within(survey.path, entry)
            if entry == step.path or (state is not None and not name.has_rank):
                role = "" if entry == step.path else name.role
                part = "/".join(filter(None, [role, *(inner.parts if inside else ())]))
                of_step = () if role or inside else others
                is_apart = inside and not (holds_models and state is not None)
                save = Save(survey, step, entry, part, is_apart, state, of_step)
                saves[PurePath(role, inner)] = save
    return saves


class _Part(Struct, frozen=True, dict=True):
    """One of a step's checkpoints that lie beside each other."""

    survey: Survey

    @cached_property
    def shapes(self) -> Counter[Index]:
        """How many matrices of its model have each shape."""
        return Counter(e.shape for e in matrices_of(self.survey, "model").entries.values())

    @cached_property
    def state_shapes(self) -> Mapping[str, Counter[Index]]:
        """The same of its optimizer's state, by the kinds of that."""
        by_kind: dict[str, Counter[Index]] = defaultdict(Counter)
        for name, entry in matrices_of(self.survey, "optimizer").entries.items():
            by_kind[StateName.of(name).kind][entry.shape] += 1
        return by_kind

    def may_train(self, model: _Part) -> bool:
        """Return whether it has state of each matrix of a model, and of no other."""
        return model.shapes in self.state_shapes.values()


def _optimizer_of(survey: Survey, parts: Sequence[_Part]) -> Survey | None:
    """Return the only part with an optimizer, if this one is the only one with a model.

    Of several, it is the only one that has state of this model's shapes, and of no other's: as of
    the halves of a GAN. If the names of several say the same, such as ``trunk_3.pth`` and
    ``trunk_optimizer_3.pth``, or fairseq2's ``model/sdp_00.pt``, only they count. Of two models one
    may be frozen; no optimizer trains an average.
    """
    model = next((part for part in parts if part.survey is survey), None)
    if model is None:
        return None
    name = without_words(survey.path.name)
    namesakes = [part for part in parts if without_words(part.survey.path.name) == name]
    is_group = len(namesakes) > 1 and any(part.state_shapes for part in namesakes)
    group = namesakes if is_group else parts
    group = [p for p in group if p is model or not AVERAGE.search(p.survey.path.name)]
    models = [part for part in group if part.shapes]
    states = [part for part in group if part.state_shapes]
    if len(models) > 1 and len(states) > 1:
        states = [state for state in states if state.may_train(model)]
        models = [part for part in models if any(state.may_train(part) for state in states)]
    is_alone = len(models) == len(states) == 1 and models[0] is model
    return states[0].survey if is_alone else None


def _is_row(shape: Index) -> bool:
    return not is_matrix(shape) and math.prod(shape) > 1
