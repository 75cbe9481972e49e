"""What a checkpoint tells of its place in a run: by its values, and its model by earlier ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import Struct

from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.names import Position
from ckptool.commands.runs.steps import Run, Step
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.state_category import state_category, weights
from ckptool.core.text import list_some
from ckptool.errors import CkptoolError
from ckptool.formats.companions import TRAINER_STATE, read_json_object, trainer_optimizer

_STEPS = (
    "train_state.step",
    "trainer.global_step",
    "trainer_state.global_step",
    "train.global_step",
    "train.step",
    "state.global_step",
    "meta.global_step",
    "meta.step",
    "global_step",
    "global_steps",
    "step",
    "iteration",
)
_MORE_STEPS = ("meta.iter", "iter", "current_step", "num_updates")
_EPOCHS = ("epoch", "meta.epoch", "trainer.epoch", "train_state.epoch", "state.epoch", "cur_epoch")
_BEST = re.compile(r"(?:.*\.)?(?:best_model_path|best_model_checkpoint)")
"""The best checkpoint according to Lightning's ModelCheckpoint and transformers' Trainer."""


def recorded_step(catalog: Catalog) -> int | None:
    """Return the training step that a value of a checkpoint records, or its format."""
    value = _count(catalog, _STEPS)
    recorded = catalog.info.get("step", "")
    return int(recorded) if value is None and recorded.isdecimal() else value


def recorded_best(step: Step, options: ReadOptions) -> Iterator[str]:
    """Yield the paths of the best checkpoints that a step's values name."""
    found = survey_readable(step.parts[0], options) if step.parts else None
    catalog = None if found is None else found.catalog
    for name, entry in catalog.objects.items() if catalog is not None else ():
        if _BEST.fullmatch(name) and isinstance(entry.value, str) and entry.value:
            yield entry.value


def recorded_position(step: Step, options: ReadOptions = AS_DETECTED) -> Position:
    """Return what a step's own values count; nothing if it cannot be read. Raises NoAnswer."""
    found = survey_readable(step.parts[0], options) if step.parts else None
    if found is None or found.catalog is None:
        return Position()
    steps = recorded_step(found.catalog)
    steps = _count(found.catalog, _MORE_STEPS) if steps is None else steps
    steps = _step_of_trainer(found) if steps is None else steps
    return Position(epoch=_count(found.catalog, _EPOCHS), step=steps)


_GROUPS = "param_groups"


def has_optimizer(each: Survey) -> bool:
    """Return whether a checkpoint, as far as it was read, has an optimizer, if only its groups."""
    return _has_file_of_optimizer(each) or any(True for _ in _of_optimizer(each))


def _has_file_of_optimizer(each: Survey) -> bool:
    if each.catalog is None:
        return False
    return trainer_optimizer(each.source.files, each.catalog.files) is not None


def _of_optimizer(each: Survey) -> Iterator[tuple[list[str], Any]]:
    """Yield what a checkpoint has of an optimizer, but for what is empty: name, tensor or value."""
    if each.catalog is None:
        return
    for name, entry in each.catalog.tensors.items():
        if state_category(entry) == "optimizer":
            yield name.split("."), entry
    for name, value in each.catalog.objects.items():
        if state_category(value) == "optimizer" and value.value not in ({}, []):
            yield name.split("."), value.value


class Contents(Struct, frozen=True):
    """Whether a step has tensors of a model, an optimizer, and anything of either.

    Of an optimizer, it may have ``state`` of parameters, and groups with some ``settings``, of
    which one is whether there is momentum: without, SGD has no state.
    """

    model: bool
    optimizer: bool
    either: bool
    state: bool
    settings: frozenset[str]

    def has_lost_state_of(self, other: Contents) -> bool:
        """Return whether the optimizer of another step is not here, or all but its settings."""
        if not self.optimizer:
            return other.optimizer
        return other.state and not self.state and self.settings == other.settings

    @classmethod
    def of(cls, surveys: tuple[Survey, ...]) -> Contents:
        """Return what some checkpoints have together."""
        catalogs = [each.catalog for each in surveys if each.catalog is not None]
        parts = [state_category(e) for c in catalogs for e in c.tensors.values()]
        parts += [state_category(e) for c in catalogs for e in c.objects.values()]
        has_model = any(bool(weights(catalog)) for catalog in catalogs)
        has_file = any(map(_has_file_of_optimizer, surveys))
        found = [each for survey in surveys for each in _of_optimizer(survey)]
        of_parameters = (value for names, value in found if _GROUPS not in names)
        settings = [(names[-1], value) for names, value in found if _GROUPS in names]
        return cls(
            has_model,
            has_file or bool(found),
            {*parts} != {"other"},
            has_file or any(isinstance(value, TensorEntry) for value in of_parameters),
            frozenset(name for name, value in settings if name != "momentum" or value != 0),
        )


Matrices = Mapping[str, tuple[int, ...]]
"""The shapes of a model's matrices, by name: of buffers, versions of a library save others."""
_PART, _SHOWN = 4, 2
"""The share of a model, one in so many, of which more is not lost but left out."""
_NUMBER = re.compile(r"\d")


class _Model(NamedTuple):
    """The tensors that a step has, the model's matrices, and the configs beside them."""

    step: str
    names: Set[str]
    matrices: Matrices
    configs: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, step: Step, surveys: Sequence[Survey]) -> _Model:
        names = {name for each in surveys if each.catalog for name in each.catalog.tensors}
        configs = [*filter(None, map(_config_beside, surveys))]
        return cls(step.path.name, names, _matrices_in(surveys), configs)

    def is_another_than(self, first: _Model) -> bool:
        """Return whether it differs on purpose: in its config, names or shapes, or by much less."""
        had, mine = first.matrices, self.matrices
        differs = bool(self.configs and first.configs) and self.configs != first.configs
        return (
            differs
            or any(had.get(name) != shape for name, shape in mine.items())
            or _PART * len(had.keys() - mine.keys()) > len(had)
        )

    def lost_of(self, first: _Model) -> list[str]:
        """Return the first one's matrices that are not here.

        None are those of which a tensor has the name, in another type, what no layer has any
        longer, such as masks, and what may have been tied since, such as a head.
        """
        from ckptool.core.keymap.model import abstract

        had, lost = first.matrices, first.matrices.keys() - self.matrices.keys()
        if not lost.isdisjoint(self.names):
            return []
        kind = {name: abstract(name)[0] for name in had}
        kinds, left = Counter(kind.values()), {kind[name] for name in self.matrices}
        apart = {shape for name, shape in self.matrices.items() if not _NUMBER.search(name)}
        return sorted(
            name
            for name in lost
            if (kinds[kind[name]] == 1 or kind[name] in left)
            and (_NUMBER.search(name) or had[name] not in apart)
        )


class Models:
    """Compares each step's model with that of the first step of its series, by names and shapes."""

    def __init__(self, run: Run, options: ReadOptions) -> None:
        self._run = run
        self._options = options
        self._first: dict[object, _Model | None] = {}

    def lost(self, step: Step, surveys: Sequence[Survey]) -> str | None:
        """Return what a step's model has lost; None if nothing, or if it is another model.

        Raises NoAnswer.
        """
        if step.series not in self._first:
            self._first[step.series] = self._find_first(step.series)
        first, own = self._first[step.series], _Model.of(step, surveys)
        if first is None or own.is_another_than(first) or not (names := own.lost_of(first)):
            return None
        return f"{list_some(names, _SHOWN)}: missing, {first.step} has it"

    def _find_first(self, series: object) -> _Model | None:
        for step in self._run.steps:
            if step.series == series:
                found = [survey_readable(part, self._options) for part in step.parts]
                model = _Model.of(step, [each for each in found if each is not None])
                if model.matrices:
                    return model
        return None


def _config_beside(each: Survey) -> Mapping[str, Any]:
    """Return the config of a model, but for what transformers calls private."""
    from ckptool.commands.model.records import CONFIG, object_in

    if CONFIG not in each.source.files:
        return {}
    with suppress(CkptoolError):  # said by its own check
        config = object_in(each.source, CONFIG)
        return {key: value for key, value in config.items() if not key.startswith("_")}
    return {}


def _matrices_in(surveys: Iterable[Survey]) -> Matrices:
    from ckptool.commands.verify.checks.meaning.weights import is_matrix

    catalogs = [each.catalog for each in surveys if each.catalog is not None]
    found = ((name, catalog.tensors.get(name)) for catalog in catalogs for name in weights(catalog))
    return {
        name: entry.shape
        for name, entry in found
        if entry and entry.source_dtype.kind == "float" and is_matrix(entry.shape)
    }


def _count(catalog: Catalog, names: tuple[str, ...]) -> int | None:
    values = (catalog.objects[name].value for name in names if name in catalog.objects)
    return next((value for value in values if type(value) is int and value >= 0), None)


def _step_of_trainer(found: Survey) -> int | None:
    with suppress(CkptoolError):
        value = read_json_object(found.source, TRAINER_STATE).get("global_step")
        return value if type(value) is int else None
    return None
