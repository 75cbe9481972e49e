"""What each trainer counts in a checkpoint, and beside it: one row a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from ckptool.commands.model.records import arguments_in
from ckptool.commands.open import Survey
from ckptool.commands.runs.trainers import NAMES
from ckptool.core.catalog import Catalog
from ckptool.errors import CkptoolError
from ckptool.formats.companions import MEGATRON, TRAINER_STATE, read_json_object
from ckptool.serialization.state_dict.leaves import read_file_leaves
from ckptool.storage.files import Files

Values = Mapping[str, object]
_UNNAMED = r"(?!)"


class Schedule(Struct, frozen=True):
    """What a scheduler counts; all but ``begin`` and what it is of are names of values."""

    name: str
    begin: int = 0
    """The count before the first step."""
    of_steps: bool = True
    """Whether it counts steps, not something of which every step has some."""
    of_samples: bool = False
    """Whether that is the samples seen."""
    scaled: str = ""
    """Whether loss scaling is used, which may skip steps that nobody counts."""
    rate: str = ""
    """The optimizer's learning rate, which tells that a scheduler has stepped, where a user may
    step it otherwise, such as to the number of the ``epoch``."""
    epoch: str = ""


class Trainer(Struct, frozen=True):
    """What a trainer counts, by the names of a checkpoint's values; from the code of ``source``."""

    source: str
    sign: str
    """The writer or framework, or a file, that its checkpoints are known by."""

    step: str
    """The step of training, or of schedulers alone."""
    counts: tuple[str, ...] = ()
    """What a resume goes on from: the step is one of these."""
    skipped: str = ""
    """Steps on which no scheduler counts."""
    may_be_set: bool = False
    """Whether users may have set the step to any number, as they have if samples are fewer."""

    name: str = _UNNAMED
    """The name of a step's file or folder, with the number as the group ``step``."""
    lags: bool = False
    """Whether the step may be before that in the name."""
    pointer: str = ""
    """The file beside a step that names the folder from which a resume goes on."""

    epochs: str = ""
    """The epochs, at whose ends alone a user may let schedulers count."""
    engine: str = ""
    """The steps of an engine that steps for the trainer: at most one fewer an epoch, whose last
    batches may be left over."""
    schedules: tuple[Schedule, ...] = ()

    samples: str = ""
    """The samples seen."""
    batch: str = ""
    """The samples of a step, unless ``growth`` says that this changes."""
    growth: str = ""

    stepped: str = ""
    """What counts the optimizer's steps, if it is as many as the step."""
    may_take_more: bool = False
    """Whether the optimizer may have taken more steps than that."""
    rates: str = ""
    """The last learning rates; an optimizer that has none of these is another save's."""

    @property
    def counts_training(self) -> bool:
        """Whether the step is that of training, not of schedulers, which a resume may leave out."""
        return self.name != _UNNAMED or self.stepped != ""


_RECORD = f"{TRAINER_STATE}: "
_SCHEDULE = "scheduler.pt"
_UNSAID = "?"
"""The name of no value: training_args.fp16 is false, too, where accelerate's settings scale."""
_LOOP, _DONE = "loops.fit_loop.epoch_loop", ".total.completed"
TRAINERS = (
    Trainer(
        "torchtitan b5bcd76, trainer.py and components/optimizer/lr_scheduler.py",
        sign="torchtitan",
        step="train_state.step",
        name=NAMES["torchtitan"],
        schedules=(Schedule("lr_scheduler.last_epoch"),),
        samples="train_state.ntokens_seen",
        stepped="train_state.step",
    ),
    Trainer(
        "verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py, workers/fsdp_workers.py: an actor"
        " that waits for its critic lags, and takes several steps of its optimizer at a time",
        sign="verl (by its file names)",
        step="extra_state.lr_scheduler.last_epoch",
        name=rf"{NAMES['verl']}(?:/actor|/critic)?",
        lags=True,
        stepped="extra_state.lr_scheduler.last_epoch",
        may_take_more=True,
    ),
    Trainer(
        "Megatron-LM d98e8a6, training/training.py and checkpointing.py",
        sign="Megatron-core",
        step="iteration",
        name=NAMES["Megatron-LM"],
        pointer=MEGATRON,
        schedules=(
            Schedule(
                "opt_param_scheduler.num_steps",
                of_steps=False,
                of_samples=True,
                scaled="args.fp16",
            ),
        ),
        samples="args.consumed_train_samples",
        batch="args.global_batch_size",
        growth="args.rampup_batch_size",
    ),
    Trainer(
        "DeepSpeed edaa722, runtime/engine.py and lr_schedules.py; its tags may count anything",
        sign="DeepSpeed",
        step="global_steps",
        may_be_set=True,
        skipped="skipped_steps",
        schedules=(
            Schedule("lr_scheduler.last_batch_iteration", -1),
            Schedule("lr_scheduler.last_epoch"),
        ),
        samples="global_samples",
        stepped="global_steps",
        rates="lr_scheduler._last_lr",
    ),
    Trainer(
        "transformers 5.24, trainer.py",
        sign=TRAINER_STATE,
        step=f"{_RECORD}global_step",
        name=NAMES["transformers"],
        epochs=f"{_RECORD}epoch",
        engine="global_steps",
        schedules=(Schedule("scheduler.last_epoch", of_steps=False, scaled=_UNSAID),),
        stepped="scheduler.last_epoch",
        rates="scheduler._last_lr",
    ),
    *(
        Trainer(
            "lightning 7f0c343, callbacks/model_checkpoint.py, loops/training_epoch_loop.py",
            sign="Lightning",
            step=f"{head}global_step",
            name=NAMES["lightning"],
            counts=(
                f"{head}{_LOOP}.automatic_optimization.optim_progress.optimizer.step{_DONE}",
                f"{head}{_LOOP}.manual_optimization.optim_step_progress{_DONE}",
            ),
        )
        for head in ("", "meta.")
    ),
    *(
        Trainer(
            "lightning 7f0c343, loops/training_epoch_loop.py, which counts steps of all schedulers",
            sign="Lightning",
            step=f"{head}{_LOOP}.scheduler_progress{_DONE}",
            schedules=(
                Schedule(
                    f"{head}lr_schedulers.0.last_epoch",
                    of_steps=False,
                    rate=f"{optimizer}.param_groups.0.lr",
                    epoch=f"{head}epoch",
                ),
            ),
        )
        for head, optimizer in (("", "optimizer_states.0"), ("meta.", "optimizer_0"))
    ),
)


def trainers_of(surveyed: Survey, catalog: Catalog) -> Iterator[tuple[Trainer, int, Values]]:
    """Yield the trainers that may have written a checkpoint, the step each counts, and values."""
    values = _values_of(surveyed.source, catalog)
    signs = {catalog.info.get(key) for key in ("framework", "writer")}
    signs |= {TRAINER_STATE} & surveyed.source.files.keys()
    for trainer in TRAINERS:
        step = number_in(values, trainer.step)
        if trainer.sign in signs and step is not None:
            yield trainer, step, values


def _values_of(source: Files, catalog: Catalog) -> Values:
    """Return a checkpoint's values and arguments, and the Trainer's record and schedule beside."""
    values: dict[str, object] = {name: entry.value for name, entry in catalog.objects.items()}
    values |= {f"args.{name}": value for name, value in arguments_in(catalog).items()}
    if TRAINER_STATE not in source.files:
        return values
    with suppress(CkptoolError):
        record = read_json_object(source, TRAINER_STATE)
        values |= {f"{_RECORD}{name}": value for name, value in record.items()}
    if _SCHEDULE in source.files:
        with suppress(CkptoolError):
            leaves = read_file_leaves(source, _SCHEDULE, prefix=("scheduler",))
            values |= {name: leaf.value for name, leaf in leaves.items()}
    return values


def number_in(values: Values, name: str) -> int | None:
    """Return the value under a name if it counts something, from -1 on."""
    value = values.get(name)
    return value if type(value) is int and value >= -1 else None
