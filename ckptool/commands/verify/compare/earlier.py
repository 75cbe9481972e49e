"""Whether the files of a save are those of two, as an earlier save of its run tells.

Training moves weights and what an optimizer keeps of them together. If one of the two is, bit for
bit, that of an earlier save and the other is not, they are of two. Much may rightly stand still:
what is frozen or learns too slowly to be seen, an average, and a model that the optimizer beside it
is not of.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.steps import Step
from ckptool.commands.verify.checks.content import located
from ckptool.commands.verify.checks.meaning.counts import steps_of_each
from ckptool.commands.verify.checks.meaning.masters import AVERAGE
from ckptool.commands.verify.checks.meaning.stacks import is_matrix
from ckptool.commands.verify.checks.meaning.trainer_counts import number_in
from ckptool.commands.verify.checks.optimizer_names import RATE, StateName, groups_of
from ckptool.commands.verify.checks.training import StepCounters
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.state_category import state_category
from ckptool.core.text import list_some, natural_key
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.companions import trainer_optimizer
from ckptool.storage.url import within

_DIFFER = "counts-differ"
_BEFORE = 3
"""How many of the steps before it a step is compared with."""
_FEW = 2
_SQUARES = frozenset(["exp_avg_sq", "square_avg"])
_VISIBLE = 1e-6
"""A learning rate whose steps change some weight of any model, if divided by sizes of gradients."""
_VISIBLE_OF_GRADIENTS = 1e-2
"""The same of steps that are not, as of SGD."""
_SEEN = 8
"""How many weights such a step must change: few of bf16 if none is near zero."""
_COUNT = re.compile(r"scheduler(?:_\d+)?\.last_epoch")
"""What accelerate saves of a scheduler."""


def earlier_problems(
    step: Step, saves: Sequence[Survey], earlier: Sequence[Step], options: ReadOptions
) -> Iterator[Problem]:
    """Yield what in a step is of one of the ``earlier`` ones, though not all of it, or was lost.

    ``saves`` are the step's checkpoints. Raises NoAnswer.
    """
    named = {within(each.path, step.path): _Save(each) for each in saves if each.path in step}
    for before in reversed(earlier[-_BEFORE:]):
        for part in (part for part in before.parts if part in before):
            save = named.get(within(part, before.path))
            found = survey_readable(part, options) if save else None
            if save and found:
                was, name = _Save(found), before.path.name
                why = _reset_scheduler(save.survey, found, name) or _mixed_with(save, was, name)
                yield from [Problem(why, _DIFFER)] if why else []
                yield from _lost_state(save, was, name) if before is earlier[-1] else ()


class _Save(Struct, frozen=True, dict=True):
    """A checkpoint of a step, with the optimizer that it has or that lies beside it."""

    survey: Survey

    @cached_property
    def optimizer(self) -> Survey | None:
        """What has the optimizer: the checkpoint itself, or a file beside it that can be read."""
        catalog, source = self.survey.catalog, self.survey.source
        if catalog is None:
            return None
        beside = trainer_optimizer(source.files, catalog.files)
        if not beside:
            return self.survey
        return survey_readable(self.survey.path / beside, ReadOptions("torch-save"))

    @cached_property
    def weights(self) -> _Matrices:
        """The matrices of the model."""
        return _matrices(self.survey, "model")


def _lost_state(save: _Save, was: _Save, name: str) -> Iterator[Problem]:
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
        is_whole = group.optimizer not in taken and group.is_adam and moved
        lost = sorted(before[group] - own, key=natural_key)
        if lost and (group.optimizer in moved or is_whole):
            message = f"{list_some(lost, _FEW)}: without optimizer state, which {name} has"
            yield Problem(message, "optimizer-incomplete")


def _with_state(optimizer: Catalog) -> Mapping[_Group, set[str]]:
    """Return what the names of state begin with in each group of parameters."""
    heads = {name.rpartition(".")[0] for name in optimizer.tensors}
    found: dict[_Group, set[str]] = {}
    for each in groups_of(optimizer):
        is_adam = f"{each.head}.betas" in optimizer.objects
        group = _Group(each.optimizer, tuple(map(str, each.parameters)), is_adam)
        found[group] = heads.intersection(map(each.state_of, each.parameters))
    return found


class _Group(NamedTuple):
    """Parameters of an optimizer; one of Adam's keeps moments of all that it steps."""

    optimizer: str
    parameters: tuple[str, ...]
    is_adam: bool


def _reset_scheduler(save: Survey, was: Survey, name: str) -> str | None:
    """Return which scheduler of accelerate has not stepped, unlike one that did at each step."""
    values, before = ({n: e.value for n, e in _values(each)} for each in (save, was))
    for count in filter(_COUNT.fullmatch, values):
        steps = number_in(before, count) or 0
        if values[count] != 0 or not steps:
            continue
        taken, taken_before = (max(_steps_taken(each).values(), default=0) for each in (save, was))
        if 0 < taken_before <= steps and taken_before < taken:
            message = f"{count} is 0, but {steps:,} in {name}, after which the optimizer has taken"
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


def _mixed_with(save: _Save, was: _Save, name: str) -> str | None:
    """Return what a save alone has of an earlier one, if that is its model or its optimizer.

    Little is read, unless something is the same: the smallest matrices first, and of each what
    precedes the first difference.
    """
    weights, weights_before = save.weights, was.weights
    one, other = save.optimizer, was.optimizer
    if not one or not other or weights.looks != weights_before.looks or weights.are_averages:
        return None
    state, state_before = _matrices(one, "optimizer"), _matrices(other, "optimizer")
    if state.looks != state_before.looks or not state.are_of(weights):
        return None
    has_weights = weights.are_those_of(weights_before)
    has_state = state.are_those_of(state_before)
    step = min(_rate_of(one), _rate_of(other)) / state.visible_rate * _VISIBLE
    if has_weights and not has_state and step >= _VISIBLE and weights.are_moved_by(step):
        return f"its weights are those of {name}, but not its optimizer: they are of two saves"
    if has_state and not has_weights and not state.are_zero:
        return f"its optimizer is that of {name}, but not its weights: they are of two saves"
    return None


class _Matrices(Struct, frozen=True):
    """Matrices of a save, by their names."""

    entries: Mapping[str, TensorEntry]
    save: Survey

    @property
    def looks(self) -> Mapping[str, object]:
        """Their shapes and types."""
        return {name: (each.shape, each.source_dtype) for name, each in self.entries.items()}

    @property
    def are_averages(self) -> bool:
        """Return whether the name of a file or of the folder says that they move otherwise."""
        files = {chunk.at.file for entry in self.entries.values() for chunk in entry.chunks}
        return any(map(AVERAGE.search, (posixpath.basename(self.save.source.root), *files)))

    @property
    def visible_rate(self) -> float:
        """Return the least learning rate with which this state's steps are seen in weights."""
        is_scaled = any(StateName.of(name).kind in _SQUARES for name in self.entries)
        return _VISIBLE if is_scaled else _VISIBLE_OF_GRADIENTS

    @property
    def are_zero(self) -> bool:
        from ckptool.commands.verify.checks.meaning.moment_bits import largest_sizes

        opened = map(self._opened, self.entries)
        return not any(largest_sizes(filter(None, opened), self.save.source).values())

    def are_moved_by(self, step: float) -> bool:
        """Return whether some differ after steps of a size, as their types round them."""
        from ckptool.commands.verify.checks.meaning.moment_bits import count_moved

        opened = filter(None, map(self._opened, self.entries))
        return count_moved(opened, self.save.source, step) >= _SEEN

    def are_of(self, weights: _Matrices) -> bool:
        """Return whether they may be the state of a model's parameters, or most of them."""
        shapes = {entry.shape for entry in weights.entries.values()}
        own = [entry.shape for entry in self.entries.values()]
        return shapes.issuperset(own) and 2 * len(own) >= len(weights.entries) > 0

    def are_those_of(self, other: _Matrices) -> bool:
        """Return whether all are bit for bit those of another save, which has the same names."""
        from ckptool.commands.verify.checks.meaning.moment_bits import are_equal

        for name in sorted(self.entries, key=lambda name: self.entries[name].elements):
            one, was = self._opened(name), other._opened(name)
            sources = self.save.source, other.save.source
            if one is None or was is None or not are_equal(one, was, *sources):
                return False
        return True

    def _opened(self, name: str) -> TensorEntry | None:
        """Return a matrix with its containers opened, None if they cannot be."""
        if self.save.catalog is None:
            return None
        with suppress(CkptoolError):  # said by the check of the save by itself
            alone = self.save.catalog.with_tensors({name: self.entries[name]})
            return located(self.save.format, self.save.source, alone, lambda item: True)[0][name]
        return None


def _matrices(save: Survey, part: str) -> _Matrices:
    entries = save.catalog.tensors.items() if save.catalog else ()
    own = {n: e for n, e in entries if is_matrix(e.shape) and state_category(e) == part}
    return _Matrices(own, save)


def _rate_of(optimizer: Survey) -> float:
    """Return the largest learning rate of an optimizer, 0 if it has none that is a number."""
    rates = (entry.value for name, entry in _values(optimizer) if RATE.fullmatch(name))
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)
