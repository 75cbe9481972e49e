"""The matrices of one save of a run: of its model, and of the optimizer in it or beside it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import PurePath

from msgspec import Struct

from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.models import Found
from ckptool.commands.runs.steps import Step
from ckptool.commands.verify.checks.content import located
from ckptool.commands.verify.checks.meaning.masters import AVERAGE, without_averages
from ckptool.commands.verify.checks.meaning.numbered import states_by_name
from ckptool.commands.verify.checks.meaning.stacks import is_matrix
from ckptool.commands.verify.checks.optimizer_names import MOMENTUM, RATE, StateName
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import state_category
from ckptool.errors import CkptoolError
from ckptool.formats.companions import trainer_optimizer
from ckptool.storage.url import within

_MEANS = frozenset(["exp_avg", MOMENTUM])
_SQUARES = frozenset(["exp_avg_sq", "square_avg"])
_VISIBLE = 1e-6
"""A learning rate whose steps change some weight of any model, if divided by sizes of gradients."""
_VISIBLE_OF_GRADIENTS = 1e-2
"""The same of steps that are not, as of SGD."""
_SEEN = 8
"""How many weights such a step must change: few of bf16 if none is near zero."""


class Save(Struct, frozen=True, dict=True):
    """A checkpoint of a step, or a model ``inside`` one, with the optimizer that it has or needs.

    That may lie beside it, or be the ``apart``, the step's only one, if this is its only model.
    """

    survey: Survey
    step: Step
    inside: bool = False
    apart: Survey | None = None

    @property
    def name(self) -> str:
        """The name of the step."""
        return self.step.path.name

    @cached_property
    def optimizer(self) -> Survey | None:
        """What has the optimizer: the checkpoint itself, or a file beside it that can be read."""
        catalog, source = self.survey.catalog, self.survey.source
        if catalog is None:
            return None
        beside = trainer_optimizer(source.files, catalog.files)
        if not beside:
            return self.apart or self.survey
        return survey_readable(self.survey.path / beside, ReadOptions("torch-save"))

    @cached_property
    def weights(self) -> Matrices:
        """The matrices of the model, but for averages of them."""
        found = matrices_of(self.survey, "model")
        return found.only(without_averages(found.entries))

    @cached_property
    def state(self) -> Matrices:
        """The matrices of the optimizer."""
        return matrices_of(self.optimizer or self.survey, "optimizer")

    @cached_property
    def momenta(self) -> Matrices:
        """What SGD and Muon keep of the gradients."""
        names = self.state.entries
        return self.state.only(name for name in names if StateName.of(name).kind == MOMENTUM)

    @property
    def rates(self) -> list[float]:
        """The learning rates of the optimizer that are numbers."""
        catalog = self.optimizer.catalog if self.optimizer else None
        objects = catalog.objects.items() if catalog else ()
        rates = (entry.value for name, entry in objects if RATE.fullmatch(name))
        return [float(rate) for rate in rates if type(rate) in (int, float)]

    def least_step(self, was: Save) -> float:
        """Return the size of a step between two saves, 0 if it may be too small to be seen.

        A save has the rate of the step that follows it, which is zero once all are taken.
        """
        first, last = (max(each.rates, default=0.0) for each in (was, self))
        step = min(first, last or first) * _VISIBLE / self.state.visible_rate
        return step if step >= _VISIBLE else 0.0

    def some_stand_still(self, was: Save) -> bool:
        """Return whether some parameters, but not all, have a learning rate of zero."""
        return 0 in was.rates or (0 in self.rates and any(self.rates))

    @cached_property
    def _means(self) -> Mapping[str, str]:
        """The names of the means of gradients, by the names of their weights."""
        models, states = models_by_tail(self.weights.entries), self.state.entries
        numbered = {each.name: each.numbered for each in states_by_name(states, models)}
        named = ((name, StateName.of(numbered.get(name, name))) for name in states)
        found = ((models.get(of.parameter), name) for name, of in named if of.kind in _MEANS)
        return {weight.name: name for weight, name in found if weight is not None}

    def may_be_trained(self, weight: str) -> bool:
        """Return whether there is state of a weight, or of none, as far as names tell."""
        return weight in self._means or not self._means

    def state_moved(self, was: Save, weight: str) -> bool | None:
        """Return whether the state of a weight is other than in an earlier save; None if unknown.

        It may be that of a matrix of the same shape and layer, if parameters have numbers alone.
        """
        name = self._means.get(weight)
        if name is None or was._means.get(weight) != name:
            return None
        return not self.state.only([name]).are_those_of(was.state)


def saves_in(step: Step, found: Iterable[Found]) -> Mapping[PurePath, Save]:
    """Return the checkpoints that were found in a step by their places in it."""
    known = [*found]
    outer = [each for inside, each in known if not inside]
    parts = [(each, _has(each, "model"), _has(each, "optimizer")) for each in outer]
    return {
        within(each.path, step.path): Save(each, step, inside, _optimizer_of(each, parts))
        for inside, each in known
        if each.path in step
    }


def _has(save: Survey, part: str) -> bool:
    return bool(matrices_of(save, part).entries)


def _optimizer_of(model: Survey, parts: Sequence[tuple[Survey, bool, bool]]) -> Survey | None:
    """Return the only part with an optimizer, if this is the only one with a model.

    Of those of its name if there are several, as fairseq2's ``model/sdp_00.pt``. Of two models one
    may be trained, and one stand still. Of each part it is known whether it has either.
    """
    alike = [each for each in parts if each[0].path.name == model.path.name]
    group = alike if len(alike) > 1 else parts
    models = [each for each, has_model, _ in group if has_model]
    states = [each for each, _, has_state in group if has_state]
    is_alone = len(models) == len(states) == 1 and models[0] is model
    return states[0] if is_alone else None


class Matrices(Struct, frozen=True):
    """Matrices of a save, by their names."""

    entries: Mapping[str, TensorEntry]
    save: Survey

    def only(self, names: Iterable[str]) -> Matrices:
        """Return those of some names."""
        return Matrices({name: self.entries[name] for name in names}, self.save)

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
        """Return whether all are, as far as they can be read; most are not in the smallest one."""
        from ckptool.commands.verify.checks.meaning.moment_bits import largest_sizes

        source, ordered = self.save.source, self._smallest_first()
        opened = (each for each in map(self.opened, ordered) if each is not None)
        return not any(any(largest_sizes([each], source).values()) for each in opened)

    def _smallest_first(self) -> list[str]:
        return sorted(self.entries, key=lambda name: self.entries[name].elements)

    def are_moved_by(self, step: float) -> bool:
        """Return whether some differ after steps of a size, as their types round them."""
        from ckptool.commands.verify.checks.meaning.moment_bits import count_moved

        opened = filter(None, map(self.opened, self.entries))
        return count_moved(opened, self.save.source, step) >= _SEEN

    def are_of(self, weights: Matrices) -> bool:
        """Return whether they may be the state of a model's parameters, or most of them."""
        shapes = {entry.shape for entry in weights.entries.values()}
        own = [entry.shape for entry in self.entries.values()]
        return shapes.issuperset(own) and 2 * len(own) >= len(weights.entries) > 0

    def are_those_of(self, other: Matrices) -> bool:
        """Return whether all are bit for bit those of another save, which has the same names."""
        from ckptool.commands.verify.checks.meaning.moment_bits import are_equal

        for name in self._smallest_first():
            one, was = self.opened(name), other.opened(name)
            sources = self.save.source, other.save.source
            if one is None or was is None or not are_equal(one, was, *sources):
                return False
        return True

    def opened(self, name: str) -> TensorEntry | None:
        """Return a matrix with its containers opened, None if they cannot be."""
        if self.save.catalog is None:
            return None
        with suppress(CkptoolError):  # said by the check of the save by itself
            alone = self.save.catalog.with_tensors({name: self.entries[name]})
            return located(self.save.format, self.save.source, alone, lambda item: True)[0][name]
        return None


def matrices_of(save: Survey, part: str) -> Matrices:
    """Return the matrices of a part of a save: its ``model`` or its ``optimizer``."""
    entries = save.catalog.tensors.items() if save.catalog else ()
    own = {n: e for n, e in entries if is_matrix(e.shape) and state_category(e) == part}
    return Matrices(own, save)
