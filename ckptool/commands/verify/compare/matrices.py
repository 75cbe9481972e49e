"""The matrices of one save of a run: of its model, and of the optimizer in it or beside it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.inspect.records import simple_value
from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.records import recorded_step
from ckptool.commands.runs.steps import Step
from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.checks.meaning.counts import UNCOUNTED, steps_of_each
from ckptool.commands.verify.checks.meaning.masters import AVERAGE, without_averages
from ckptool.commands.verify.checks.meaning.numbered import weight_of_each
from ckptool.commands.verify.checks.meaning.stacks import Index, is_matrix
from ckptool.commands.verify.checks.meaning.trainer_counts import number_in, trainers_of
from ckptool.commands.verify.checks.measures import (
    are_equal,
    count_moved,
    half_reaches,
    largest_sizes,
)
from ckptool.commands.verify.checks.optimizer_names import MOMENTUM, RATE, StateName
from ckptool.commands.verify.checks.training import StepCounters
from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import lone_masters, state_category
from ckptool.formats.companions import trainer_optimizer
from ckptool.serialization.pickle.records import Call
from ckptool.storage.url import Location, within

_MEANS = frozenset(["exp_avg", MOMENTUM])
_SQUARES = frozenset(["exp_avg_sq", "square_avg", "state2"])
"""``state2`` is bitsandbytes'."""
_VISIBLE = 1e-6
"""A learning rate whose steps change some weight of any model, if divided by sizes of gradients."""
_VISIBLE_OF_GRADIENTS = 1e-2
"""The same for steps that are not divided, such as SGD's."""
_LARGEST = 1e-3
"""How much of a gradient counts at most for a step that is not divided by its size."""
_BESIDE = 0.02
"""The share of an optimizer's state that may be numbers of other shapes than its weights."""
_SEEN = 8
"""How many weights a visible step changes at least: few of bf16, if none is near zero."""


class Save(Struct, frozen=True, dict=True):
    """A checkpoint of a step, or a model ``inside`` one, with the optimizer that trains it.

    It is, or lies in, an ``entry`` of the step; ``part`` says of which of several side by side, and
    of which model inside. ``optimizer_part`` is the step's only checkpoint with an optimizer, if
    this is its only model, or the only one whose name says the same. ``others`` are files beside
    the step's first one, unless they are of ranks.
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
        files = {c.at.file for entry in self.weights.entries.values() for c in entry.chunks}
        folders = self.name, *within(self.survey.path, self.entry).parts
        return any(map(AVERAGE.search, (*folders, *files)))

    def has_rows_of(self, predecessor: Save) -> bool:
        """Return whether what the optimizer has beside matrices is that of an earlier save.

        Some keep their moments as rows, beside matrices that stay the same: masks, projections.
        """
        rows, old_rows = (
            tensors_of(save.optimizer or save.survey, "optimizer", _is_row)
            for save in (self, predecessor)
        )
        return rows.looks == old_rows.looks and rows.are_equal_to(old_rows)

    @cached_property
    def squares(self) -> Matrices:
        """The means of squares of matrices, which steps are divided by, but for those in codes."""
        entries = self.state.entries
        squares = (name for name in entries if StateName.of(name).kind in _SQUARES)
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
        """The momentum of each matrix that counts no steps: of SGD and Muon, or Lion's mean."""
        kinds = {MOMENTUM} if self.steps_taken else _MEANS
        names = self.state.entries
        return self.state.only(name for name in names if StateName.of(name).kind in kinds)

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
    def recorded(self) -> frozenset[int]:
        """The steps that its values and its trainer's record count."""
        step = recorded_step(self.survey.catalog) if self.survey.catalog else None
        return frozenset([*self.counts.values(), *([] if step is None else [step])])

    @cached_property
    def steps_taken(self) -> Mapping[str, float]:
        """How many steps each optimizer has taken, as far as they are counted."""
        counters, survey = StepCounters(), self.optimizer or self.survey
        if survey.catalog is None:
            return {}
        numbers = (name for name, entry in survey.catalog.tensors.items() if entry.elements == 1)
        counters.read(locate_whole(survey, numbers).values(), survey.source, announced=False)
        return steps_of_each(survey.catalog, counters.taken)

    @property
    def most_steps_taken(self) -> float:
        """The most steps that an optimizer has taken, of those that were counted one by one."""
        counts = self.steps_taken.values()
        return max((count for count in counts if count < UNCOUNTED), default=0)

    @cached_property
    def rates(self) -> list[float]:
        """The learning rates of the optimizer that are finite numbers, or tensors of one."""
        survey = self.optimizer
        if survey is None or survey.catalog is None:
            return []
        values = (e.value for n, e in survey.catalog.objects.items() if RATE.fullmatch(n))
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
        step = min(first, last or first) * _VISIBLE / self.state.visible_rate
        return step if step >= _VISIBLE else 0.0

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
        if self.state.visible_rate == _VISIBLE or self.has_frozen_group(predecessor):
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
        return count >= matrix.elements / 2 + _SEEN

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


class Matrices(Struct, frozen=True, dict=True):
    """Matrices of a save, by their names."""

    entries: Mapping[str, TensorEntry]
    survey: Survey

    def only(self, names: Iterable[str]) -> Matrices:
        """Return the matrices of these names."""
        return Matrices({name: self.entries[name] for name in names}, self.survey)

    @property
    def looks(self) -> Mapping[str, object]:
        """Their shapes and types, by their names."""
        return {name: (entry.shape, entry.source_dtype) for name, entry in self.entries.items()}

    @cached_property
    def visible_rate(self) -> float:
        """Return the least learning rate with which this state's steps are seen in weights."""
        is_scaled = any(StateName.of(name).kind in _SQUARES for name in self.entries)
        return _VISIBLE if is_scaled else _VISIBLE_OF_GRADIENTS

    @property
    def are_zero(self) -> bool:
        """Return whether all elements are, as far as matrices can be read; the smallest first."""
        source, opened = self.survey.source, filter(None, map(self.opened, self._smallest_first()))
        return not any(any(largest_sizes([entry], source).values()) for entry in opened)

    def _smallest_first(self) -> list[str]:
        return sorted(self.entries, key=lambda name: self.entries[name].elements)

    def are_moved_by(self, step: float) -> bool:
        """Return whether a step of this size changes elements, once rounded to their types."""
        opened = filter(None, map(self.opened, self.entries))
        return count_moved(opened, self.survey.source, step) >= _SEEN

    def may_be_state_of(self, weights: Matrices) -> bool:
        """Return whether these may be state of weights: of their shapes, and of half as many.

        Some optimizers stack the state of weights of one shape (nanochat's Muon, ScaledAdam), and
        keep a few numbers beside it.
        """
        shapes = {entry.shape for entry in weights.entries.values()}
        entries = self.entries.values()
        alike = [e for e in entries if not shapes.isdisjoint([e.shape, e.shape[1:]])]
        count = sum(1 if entry.shape in shapes else entry.shape[0] for entry in alike)
        others = sum(e.elements for e in entries) - sum(e.elements for e in alike)
        is_all = others <= _BESIDE * sum(entry.elements for entry in alike)
        return is_all and 2 * count >= len(weights.entries) > 0

    def are_equal_to(self, other: Matrices) -> bool:
        """Return whether all are bit for bit those of their names in another save."""
        for name in self._smallest_first():
            entry, other_entry = self.opened(name), other.opened(name)
            sources = self.survey.source, other.survey.source
            if entry is None or other_entry is None or not are_equal(entry, other_entry, *sources):
                return False
        return True

    def opened(self, name: str) -> TensorEntry | None:
        """Return the entry of a matrix with its containers opened, None if they cannot be."""
        return locate_whole(self.survey, [name]).get(name)


def _is_row(shape: Index) -> bool:
    return not is_matrix(shape) and math.prod(shape) > 1


def matrices_of(survey: Survey, part: str) -> Matrices:
    """Return the matrices of a part of a checkpoint: its ``model`` or its ``optimizer``."""
    return tensors_of(survey, part, is_matrix)


def tensors_of(survey: Survey, part: str, has_shape: Callable[[Index], bool]) -> Matrices:
    """Return the tensors of some shapes of a part of a checkpoint, ``model`` or ``optimizer``.

    Masters that are a parameter's only weight are of the model.
    """
    catalog = survey.catalog
    if catalog is None:
        return Matrices({}, survey)
    tensors = {n: e for n, e in catalog.tensors.items() if has_shape(e.shape)}
    for name in tensors.keys() & lone_masters(catalog):
        tensors[name] = replace(tensors[name], part="model")
    return Matrices({n: e for n, e in tensors.items() if state_category(e) == part}, survey)
