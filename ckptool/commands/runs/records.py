"""What a checkpoint records about its place in a run, in its values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.runs.names import Position
from ckptool.commands.runs.steps import Step
from ckptool.core.catalog import Catalog
from ckptool.core.state_category import state_category
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


def has_optimizer(each: Survey) -> bool:
    """Return whether a checkpoint, as far as it was read, has an optimizer's state."""
    if each.catalog is None:
        return False
    if trainer_optimizer(each.source.files, each.catalog.files) is not None:
        return True
    parts = {state_category(entry) for entry in each.catalog.tensors.values()}
    parts |= {state_category(entry) for entry in each.catalog.objects.values()}
    return "optimizer" in parts


def _count(catalog: Catalog, names: tuple[str, ...]) -> int | None:
    values = (catalog.objects[name].value for name in names if name in catalog.objects)
    return next((value for value in values if type(value) is int and value >= 0), None)


def _step_of_trainer(found: Survey) -> int | None:
    with suppress(CkptoolError):
        value = read_json_object(found.source, TRAINER_STATE).get("global_step")
        return value if type(value) is int else None
    return None
