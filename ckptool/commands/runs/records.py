"""What a checkpoint records of its place in a run, and what it has of a model and an optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.names import Position
from ckptool.commands.runs.steps import Step
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.state_category import state_category, state_category_of_name, weights
from ckptool.errors import CkptoolError
from ckptool.formats import single_file_suffixes
from ckptool.formats.base import DELTA
from ckptool.formats.companions import TRAINER_STATE, read_json_object
from ckptool.serialization.file_roles import role_of
from ckptool.storage.url import Location

_STEPS = (
    "train_state.step",
    "trainer.global_step",
    "trainer.iteration",  # ignite
    "trainer_state.global_step",
    "train.global_step",
    "train.step",
    "state.global_step",
    "progress.step",  # PRIME-RL
    "meta.global_step",
    "meta.step",
    "global_step",
    "global_steps",
    "step",
    "iteration",
)
_RESETS = 9
"""How often an optimizer of fairseq may have been made anew; each is in its history."""
_MORE_STEPS = (
    *("meta.iter", "iter", "current_step", "num_updates"),
    *(f"optimizer_history.{at}.num_updates" for at in range(_RESETS, -1, -1)),
)
_EPOCHS = (
    *("epoch", "meta.epoch", "trainer.epoch", "train_state.epoch", "state.epoch", "cur_epoch"),
    *("start_epoch", "last_epoch", "extra_state.train_iterator.epoch"),  # YOLOX, RT-DETR, fairseq
    "reporter.epoch",  # ESPnet
)
_HEADS = ("", "app.")
"""Where values are: as the top of a checkpoint, or in the AppState of torch's recipe of DCP."""
_BEST = re.compile(r"(?:.*\.)?(?:best_model_path|best_model_checkpoint)")
"""The best checkpoint according to Lightning's ModelCheckpoint and transformers' Trainer."""


def recorded_step(catalog: Catalog) -> int | None:
    """Return the training step that a value of a checkpoint records, or its format."""
    value = _count(catalog, _STEPS)
    recorded = catalog.info.get("step", "")
    return int(recorded) if value is None and recorded.isdecimal() else value


def recorded_counts(catalog: Catalog) -> dict[str, int]:
    """Return the whole numbers that a checkpoint records beside its optimizer, by their names.

    Each trainer has a name of its own for the one that counts its steps.
    """
    objects = catalog.objects.items()
    numbers = ((name, v) for name, v in objects if type(v.value) is int and v.value >= 0)
    counts = {name: v.value for name, v in numbers if state_category(v) != "optimizer"}
    step = recorded_step(catalog)
    return counts if step is None else {"": step, **counts}


def recorded_best(step: Step, options: ReadOptions) -> Iterator[str]:
    """Yield the paths of the best checkpoints that a step's values name."""
    survey = survey_readable(step.parts[0], options) if step.parts else None
    catalog = None if survey is None else survey.catalog
    for name, entry in catalog.objects.items() if catalog is not None else ():
        if _BEST.fullmatch(name) and isinstance(entry.value, str) and entry.value:
            yield entry.value


def recorded_position(step: Step, options: ReadOptions = AS_DETECTED) -> Position:
    """Return what a step's own values count; nothing if it cannot be read. Raises NoAnswer."""
    part = step.parts[0] if step.parts else None
    survey = None if part is None else survey_readable(part, read_alone(part, step, options))
    if survey is None or survey.catalog is None:
        return Position()
    steps = recorded_step(survey.catalog)
    steps = _count(survey.catalog, _MORE_STEPS) if steps is None else steps
    steps = _step_of_trainer(survey) if steps is None else steps
    return Position(epoch=_count(survey.catalog, _EPOCHS), step=steps)


def read_alone(part: Location, step: Step, options: ReadOptions) -> ReadOptions:
    """Return how to read a checkpoint of a step: one of several ranks' files by itself."""
    if options.from_format is not None or not step.is_of_rank(part):
        return options
    return replace(options, from_format="torch-save")


_GROUPS = "param_groups"
_UNREAD = frozenset("file-type-mismatch file-unreadable tensor-unsupported hostile-global".split())
"""Codes of what is not damaged for sure, and not read: an optimizer saved as an object, too."""
_SCHEDULED = re.compile(r"(?:.+\.)?(?:\w*_)?schedulers?(?:_?\d+)?(?:\.\d+)?\.last_epoch")
"""How many times a scheduler has stepped."""


def has_optimizer(survey: Survey) -> bool:
    """Return whether a checkpoint, as far as it was read, has an optimizer, if only its groups."""
    return _has_unread_optimizer(survey) or any(True for _ in _of_optimizer(survey))


def _has_unread_optimizer(survey: Survey) -> bool:
    """Return whether an optimizer is in a file of its own, or an object of a class not loaded.

    As ``optimizer.pt`` of transformers' Trainer, or ``optim_world_size_2_rank_0.pt`` of AReaL.
    """
    if survey.catalog is None:
        return False
    sizes, files = survey.source.files, survey.catalog.files
    unread = (name for name in sizes if "/" not in name and name not in files and sizes[name])
    objects = (p.tensor for p in survey.problems if p.code == "tensor-unsupported" and p.tensor)
    is_object = any(state_category_of_name(name, ()) == "optimizer" for name in objects)
    suffixes = tuple(single_file_suffixes())
    return is_object or any(n.endswith(suffixes) and role_of(n) == "optimizer" for n in unread)


def _of_optimizer(survey: Survey) -> Iterator[tuple[list[str], Any]]:
    """Yield what a checkpoint has of an optimizer, but for what is empty: name, tensor or value."""
    if survey.catalog is None:
        return
    for name, entry in survey.catalog.tensors.items():
        if state_category(entry) == "optimizer":
            yield name.split("."), entry
    for name, value in survey.catalog.objects.items():
        if state_category(value) == "optimizer" and value.value not in ({}, []):
            yield name.split("."), value.value


class Contents(Struct, frozen=True):
    """Whether a step has a model's tensors, an optimizer, any state of these, and anything else.

    Of an optimizer, it may have ``state`` of parameters, and groups with some ``settings``, of
    which one is whether there is momentum: without, SGD has no state. It ``begins`` if no scheduler
    has stepped. What is ``unread``, and yet may be sound, may have anything. A ``delta`` has
    changes of weights alone.
    """

    model: bool
    optimizer: bool
    any_state: bool
    other: bool
    state: bool
    settings: frozenset[str]
    begins: bool
    unread: bool
    delta: bool

    @property
    def may_resume(self) -> bool:
        """Whether training may go on from it: it has an optimizer, or what is not read."""
        return self.optimizer or self.unread

    def has_lost_state_of(self, other: Contents) -> bool:
        """Return whether it lacks the optimizer of another step, or all of it but the settings.

        An optimizer that is made anew has only settings until it steps; so is its scheduler then.
        """
        if not self.optimizer:
            return other.optimizer
        if self.begins and not other.begins:
            return False
        return other.state and not self.state and self.settings == other.settings

    @classmethod
    def of(cls, surveys: Sequence[Survey], *, unread: bool) -> Contents:
        """Return what some checkpoints have together, beside any that are ``unread``."""
        catalogs = [survey.catalog for survey in surveys if survey.catalog is not None]
        parts = [state_category(e) for c in catalogs for e in c.tensors.values()]
        parts += [state_category(e) for c in catalogs for e in c.objects.values()]
        has_model = any(bool(weights(catalog)) for catalog in catalogs)
        has_unread = any(map(_has_unread_optimizer, surveys))
        items = [item for survey in surveys for item in _of_optimizer(survey)]
        of_parameters = (value for names, value in items if _GROUPS not in names)
        settings = [(names[-1], value) for names, value in items if _GROUPS in names]
        values = ((name, e.value) for c in catalogs for name, e in c.objects.items())
        counts = [value for name, value in values if _SCHEDULED.fullmatch(name)]
        return cls(
            has_model,
            has_unread or bool(items),
            {*parts} != {"other"},
            "other" in parts,
            has_unread or any(isinstance(value, TensorEntry) for value in of_parameters),
            frozenset(name for name, value in settings if name != "momentum" or value != 0),
            bool(counts) and not any(counts),
            unread or any(p.code in _UNREAD for survey in surveys for p in survey.problems),
            any(DELTA in catalog.info for catalog in catalogs),
        )


def _count(catalog: Catalog, names: tuple[str, ...]) -> int | None:
    objects = catalog.objects
    paths = (head + name for name in names for head in _HEADS)
    values = (objects[path].value for path in paths if path in objects)
    return next((value for value in values if type(value) is int and value >= 0), None)


def _step_of_trainer(survey: Survey) -> int | None:
    with suppress(CkptoolError):
        value = read_json_object(survey.source, TRAINER_STATE).get("global_step")
        return value if type(value) is int else None
    return None
