"""What each trainer writes into a run: one row a trainer, each read from the source it names.

Names that no row has are read by their words (``names.py``). A row never makes a step good: it says
what a name counts, and by which traces a save that was not finished is known.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property

from msgspec import Struct


class Trainer(Struct, frozen=True, dict=True):
    """What a trainer writes.

    ``source`` is the module and version that was read. ``step`` is the whole name of an entry, with
    the groups ``stage``, ``epoch``, ``step`` (which order it), ``bare`` (which may be anything
    else, or counts inside these), ``date`` (which tells steps apart), ``rank`` and ``part`` (one
    of several files of a step, by a number and by a name).
    ``writes`` is the whole name of any entry of its own, if it has others too.
    ``unfinished`` is the whole name of an entry that is being written, ``marks`` are files in it,
    or beside it under its name, that say the same. A step with one of ``signs`` is this trainer's,
    and unfinished without ``last``, which it writes last: each may be any of several names.
    ``pointers`` are files by which it names a step, ``spared`` entries that its own clean-up never
    deletes. ``exports`` lie beside a step, without what training needs; ``tells`` is false if a
    name alone does not tell a step from something else, so that nothing is removed by it.
    """

    name: str
    source: str
    step: str
    writes: str = ""
    unfinished: str = r"(?!)"
    marks: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    spared: str = r"(?!)"
    exports: str = r"(?!)"
    tells: bool = True

    @cached_property
    def steps(self) -> re.Pattern[str]:
        """The pattern of a step's name."""
        return re.compile(self.step)

    def lacks_last(self, name: str, files: Collection[str]) -> str | None:
        """Return the file that is written last if a step of this trainer's lacks it."""
        if not self.last or re.fullmatch(self.writes or self.step, name) is None:
            return None
        if any(_matches(file, self.last) for file in files):
            return None
        is_theirs = any(_matches(file, self.signs) for file in files)
        return self.last[0].replace("\\", "").replace("_d+", "_0") if is_theirs else None


def _matches(file: str, patterns: Collection[str]) -> bool:
    return any(re.fullmatch(pattern, file) is not None for pattern in patterns)


TRAINERS = (
    Trainer(
        "torch",
        "torch 2.13, distributed/checkpoint/filesystem.py: .metadata.tmp, renamed last",
        step=r"(?:step|ckpt|checkpoint)[-_](?P<step>\d{1,18})",
    ),
    Trainer(
        "torchtitan",
        "torchtitan b5bcd76, components/checkpointer/base.py and dcp.py; 0.2: tmp_step-N;"
        " experiments/torchft/checkpoint.py; the same with torch_checkpointing 0.1.1",
        step=r"step-(?P<step>\d{1,18})",
        unfinished=r"tmp[-_]step[-_]\d+",
        exports=r"ft-replicat-\d+",
    ),
    Trainer(
        "accelerate",
        "accelerate 16cb6eb, checkpointing.py and accelerator.py",
        step=r"(?:checkpoint|step)_(?P<step>\d{1,18})",
        signs=(r"scheduler(?:_\d+)?\.bin", r"sampler(?:_\d+)?\.bin"),
        last=(r"random_states_\d+\.pkl",),
    ),
    Trainer(
        "transformers",
        "transformers 5.24, trainer.py and trainer_utils.py; 4.36 to 4.40: tmp-checkpoint-N",
        step=r"checkpoint-(?P<step>\d{1,18})",
        unfinished=r"tmp-checkpoint-\d+",
        signs=(r"training_args\.bin", r"rng_state(?:_\d+)?\.pth"),
        last=(r"trainer_state\.json",),
        pointers=(r"trainer_state\.json",),
    ),
    Trainer(
        "lightning",
        "lightning 7f0c343, callbacks/model_checkpoint.py",
        step=r"(?:.*[-_])?epoch=(?P<epoch>\d+)-step=(?P<step>\d+)(?:-v\d+)?\.ckpt",
        writes=r".+\.ckpt",
        signs=(r"__\d+_\d+\.distcp",),
        last=(r"meta\.pt",),
        spared=r"last(?:-v?\d+)?(?:\.ckpt)?",
    ),
    Trainer(
        "composer",
        "composer 6405188, callbacks/checkpoint_saver.py",
        step=r"ep(?P<epoch>\d+)-ba(?P<step>\d+)(?:-rank(?P<rank>\d+))?(?:\.pt)?",
        pointers=(r"latest-rank\d+(?:\.pt)?\.symlink",),
        spared=r"latest-rank\d+(?:\.pt)?",
    ),
    Trainer(
        "ignite",
        "ignite de08e79, handlers/checkpoint.py",
        step=r"(?:.*_)?(?:checkpoint|model_(?=\d+_[a-zA-Z]\w*=))_?(?P<step>\d+)"
        r"(?:_[a-zA-Z]\w*=-?[\d.]+(?:e-?\d+)?)?\.pt",
        spared=r"(?:.*_)?best_.*",
        tells=False,
    ),
    Trainer(
        "mmengine",
        "mmengine 2543429, hooks/checkpoint_hook.py",
        step=r"(?:epoch_(?P<epoch>\d+)|iter_(?P<step>\d+))(?:\.pth)?",
        pointers=(r"last_checkpoint",),
        spared=r"best_.*",
    ),
    Trainer(
        "torchtune",
        "torchtune 0.6.1, training/checkpointing/_checkpointer.py; the optimizer of the latest",
        step=r"epoch_(?P<epoch>\d+)",
        exports=r"recipe_state",
    ),
    Trainer(
        "torchtune, shards",
        "torchtune 0.4, training/checkpointing/_checkpointer.py: hf_model_SHARD_EPOCH.pt",
        step=r"hf_model_(?P<rank>0\d{3})_(?P<epoch>\d+)\.pt",
    ),
    Trainer(
        "timm",
        "timm aa4b585, utils/checkpoint_saver.py",
        step=r"checkpoint-(?P<epoch>\d+)\.pth\.tar",
        unfinished=r"(?:recovery_)?tmp\.pth\.tar",
        spared=r"(?:last|model_best)\.pth\.tar",
    ),
    Trainer(
        "timm, recovery",
        "timm aa4b585, utils/checkpoint_saver.py: save_recovery",
        step=r"recovery-(?P<epoch>\d+)-(?P<step>\d+)\.pth\.tar",
    ),
    Trainer(
        "NeMo",
        "NeMo 8cfedd7, lightning/pytorch/callbacks/model_checkpoint.py; NeMo 1:"
        " utils/callbacks/nemo_model_checkpoint.py",
        step=r".+--(?:(?!--).)*step=(?P<step>\d+)(?:\.0)?-consumed_samples=[\d.]+(?:\.ckpt)?",
        marks=(r"NAME-unfinished",),
        spared=r".*-last(?:\.ckpt)?",
    ),
    Trainer(
        "AutoModel",
        "NeMo AutoModel 36044ad, components/checkpoint/lifecycle.py",
        step=r"epoch_(?P<epoch>\d+)_step_(?P<step>\d+)",
        marks=(r"\.incomplete",),
        pointers=(r"[A-Z_]+\.txt",),
        spared=r"LATEST|LOWEST_VAL",
    ),
    Trainer(
        "DeepSpeed",
        "DeepSpeed edaa722, runtime/engine.py: latest is written last, beside the step",
        step=r"global_step(?P<step>\d+)(?:_universal)?",
        pointers=(r"latest", r"latest_universal"),
    ),
    Trainer(
        "Megatron-LM",
        "Megatron-LM d98e8a6, training/checkpointing.py",
        step=r"iter_(?P<step>\d{7,18})",
        signs=(r"common\.pt",),
        last=(r"metadata\.json",),
        pointers=(r"latest_checkpointed_iteration\.txt",),
        spared=r"release",
    ),
    Trainer(
        "Megatron-Bridge",
        "Megatron-Bridge 067f987, training/checkpointing.py and utils/checkpoint_utils.py",
        step=r"iter_(?P<step>\d{7,18})",
        signs=(r"train_state\.pt",),
        last=(r"run_config\.yaml",),
        pointers=(r"latest_train_state\.pt",),
    ),
    Trainer(
        "OLMo-core",
        "OLMo-core fa6c501, train/checkpoint.py; stages as on the Hub; OLMo 0.5, checkpoint.py",
        step=r"(?:stage(?P<stage>\d+)-(?:ingredient\d+-)?)?step(?P<step>\d+)(?:-tokens\d+[MBT])?",
        unfinished=r"(?:.*-)?step\d+-tmp",
        signs=(r"train/rank\d+\.pt",),  # first; without it no trainer saved model_and_optim
        last=(r"\.metadata\.json", r"config\.yaml"),  # OLMo 0.5 writes the latter last
    ),
    Trainer(
        "nanotron",
        "nanotron 2411b02, trainer.py and serialize/main.py",
        step=r"(?P<bare>\d{1,18})",
        signs=(r"checkpoint_metadata\.json", r"lr_scheduler/.*"),
        last=(r"model_config\.json",),
        pointers=(r"latest\.txt",),
        tells=False,
    ),
    Trainer(
        "OpenRLHF",
        "OpenRLHF 3c3be62, utils/deepspeed/deepspeed.py",
        step=r"global_step(?P<step>\d+)",
        pointers=(r"latest",),
        spared=r"best_global_step\d+(?:_hf)?",
        exports=r"(?:best_)?global_step\d+_hf",
    ),
    Trainer(
        "verl",
        "verl b178a3c, trainer/ppo/ray_trainer.py",
        step=r"global_step_(?P<step>\d+)",
        pointers=(r"latest_checkpointed_iteration\.txt",),
    ),
    Trainer(
        "nvrx",
        "nvidia-resiliency-ext d8686d9, checkpointing/local/ckpt_managers/local_manager.py",
        step=r"iter_(?P<step>\d{7,18})_(?P<rank>\d+)_local\.pt",
        unfinished=r"iter_\d{7,18}_\d+_local\.dirty\.pt",
    ),
    Trainer(
        "orbax",
        "orbax 3ff7b24, checkpoint/_src/path/atomicity.py",
        step=r"(?P<bare>\d{1,18})",
        unfinished=r".+\.orbax-checkpoint-tmp(?:-\d+)?",
        tells=False,
    ),
    Trainer(
        "fairseq",
        "fairseq 0.12, checkpoint_utils.py",
        step=r"checkpoint(?:_(?P<epoch>\d+)_(?P<step>\d+)|(?P<bare>\d+))(?:-shard(?P<rank>\d+))?\.pt",
        spared=r"checkpoint_(?:best|last).*\.pt",
        tells=False,
    ),
    Trainer(
        "detectron2",
        "fvcore 0.1.5, common/checkpoint.py: PeriodicCheckpointer",
        step=r"\w+_(?P<step>\d{7})\.pth",
        pointers=(r"last_checkpoint",),
        tells=False,
    ),
    Trainer(
        "AllenNLP",
        "allennlp 2.10, training/checkpointer.py: _b0 at the end of an epoch; 1: _epoch_N.th",
        step=r"(?:model|training)_state_e(?P<epoch>\d+)_b(?:0|(?P<step>\d+))\.th",
    ),
    Trainer(
        "pytorch-metric-learning",
        "pytorch-metric-learning 2.9, utils/logging_presets.py and common_functions.py: each model,"
        " loss, optimizer and scheduler in a file of its own",
        step=r"(?P<part>(?:trunk|embedder|(?:[a-z]+_)?classifier(?:_\d+)?|generator"
        r"|(?:metric|classifier|synth|g_adv)_loss)"
        r"(?:_optimizer|_scheduler_by_(?:iteration|epoch|plateau))?)_(?:best)?(?P<bare>\d+)\.pth",
        tells=False,
    ),
    Trainer(
        "AReaL",
        "AReaL 5dbc86d, utils/saver.py; the optimizer is in recover_checkpoint alone",
        step=r"epoch(?P<epoch>\d+)epochstep(?P<bare>\d+)globalstep(?P<step>\d+)",
    ),
    Trainer(
        "FunASR",
        "FunASR 1.4, train_utils/trainer_ds.py",
        step=r"model\.pt\.ep(?P<epoch>\d+)(?:\.(?P<step>\d+))?",
        spared=r"model\.pt\.(?:best|avg\d+)",
    ),
    Trainer(
        "ESPnet",
        "espnet 01d307c, espnet2/train/trainer.py; the optimizer is in checkpoint.pth alone",
        step=r"(?P<epoch>\d+)epoch\.pth",
    ),
    Trainer(
        "OneTrainer",
        "OneTrainer, modules/trainer/GenericTrainer.py: models in save, for use",
        step=r"(?:.*[-_])?(?P<date>\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)-(?:backup|save)"
        r"-(?P<step>\d+)-(?P<epoch>\d+)-(?P<bare>\d+)(?:\.safetensors)?",
        exports=r".*\d-save-\d+-\d+-\d+(?:\.safetensors)?",
    ),
    Trainer(
        "PhysicsNeMo",
        "PhysicsNeMo 2.2, utils/checkpoint.py: each model, and the state of training, by itself",
        step=r"(?P<part>checkpoint|[A-Z]\w*)\.(?P<rank>\d+)\.(?P<bare>\d+)\.pt",
        tells=False,
    ),
    Trainer(
        "SpeechBrain",
        "speechbrain 1.1.2, utils/checkpoints.py",
        step=r"CKPT\+(?P<date>\d{4}-\d\d-\d\d\+\d\d-\d\d-\d\d\+\d\d)",
    ),
)

NAMES = {row.name: row.step for row in TRAINERS}
"""The whole names of the steps of each trainer."""
_SPARED = (
    "|".join(f"(?:{row.spared})" for row in TRAINERS)
    + r"|(?i:(?:.*[-_.])?(?:best|final|last|latest)(?:[-_.].*)?)"
)
_BEGUN = r"(?:tmp|temp|partial|incomplete|unfinished|staging|dirty|saving|writing|in_?progress)"
UNFINISHED = (
    "|".join(f"(?:{row.unfinished})" for row in TRAINERS)
    + rf"|(?i:[-_.]*{_BEGUN}(?:[-_.].*)?|.+[-_.]{_BEGUN}[-_.]*[0-9a-f-]*(?:\.[a-z]+)*)"
    + r"|(?i:.+\.(?:part|wip|new))"
)
"""Whole names of entries that a save which was not finished leaves."""
EXPORTS = "|".join(f"(?:{row.exports})" for row in TRAINERS)
POINTERS = "|".join(f"(?:{p})" for row in TRAINERS for p in row.pointers)
LAST_RECORD = "|".join(p for row in TRAINERS for p in row.last if p.endswith(".json"))
"""Names of the files in JSON that trainers write last."""
_BESIDE = tuple(m.removeprefix("NAME") for row in TRAINERS for m in row.marks if "NAME" in m)
_INSIDE = tuple(m for row in TRAINERS for m in row.marks if "NAME" not in m)


def is_spared(name: str) -> bool:
    """Return whether an entry is no step among many: no clean-up of a trainer deletes it."""
    return re.fullmatch(_SPARED, name) is not None


def unfinished_mark(name: str, files: Collection[str], neighbours: Collection[str]) -> str | None:
    """Return the file that says that a step is being written; None if there is none.

    ``files`` are relative to the step, ``neighbours`` are the names in the folder around it.
    """
    stem = re.sub(r"(?:-EMA)?(?:\.ckpt|\.pt|\.pth)?$", "", name)
    marks = [head + tail for head in (name, stem) for tail in _BESIDE]
    inside = (file for file in files if _matches(file, _INSIDE))
    return next(inside, None) or next((mark for mark in marks if mark in neighbours), None)


def unwritten_last(name: str, files: Collection[str]) -> str | None:
    """Return the file that a step's trainer writes last, if the step lacks it; else None."""
    lacking = (row.lacks_last(name, files) for row in TRAINERS)
    return next((file for file in lacking if file is not None), None)
