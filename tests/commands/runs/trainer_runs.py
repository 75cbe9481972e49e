"""Runs as trainers leave them: names, files and their order are those of the sources they name.

What is in the files is small; which files there are, and in which order they are written, is what
``ckptool/commands/runs/trainers.py`` says with its sources.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from safetensors.torch import save_file

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.verify import RunReport, verify_run

CLOCK = 1_700_000_000
WEIGHT = torch.arange(4.0)
OPTIMIZER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": WEIGHT, "exp_avg_sq": WEIGHT}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}
Write = Callable[[Path], object]


def checked(run: Path) -> RunReport:
    return verify_run(run, VerifyOptions(), every=True)


def saved(state: object) -> Write:
    return lambda path: torch.save(state, path)


def text(words: str) -> Write:
    return lambda path: path.write_text(words)


def copy_of(path: Path) -> Write:
    return lambda to: shutil.copy(path, to)


def weights(path: Path) -> None:
    save_file({"w": WEIGHT}, path, {"format": "pt"})


def of_dcp(*parts: str) -> Write:
    state = {"model": {"w": WEIGHT}, "optimizer": {"state": {"w": {"exp_avg": WEIGHT}}},
             "dataloader": {"dp_rank_0": {"seen": 3}}, "train_state": {"step": 3}}  # fmt: skip
    chosen = {part: state[part] for part in parts}
    return lambda path: dcp.save(chosen, checkpoint_id=path, no_dist=True)


def write(folder: Path, files: dict[str, Write], most: int | None = None) -> None:
    """Write the first files of a step, in the order in which its trainer does."""
    for name in [*files][:most]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files[name](path)


def age(path: Path, at: int) -> None:
    """Set the time of all files below, or of one file: ``at`` counts minutes."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if not each.is_symlink():
            os.utime(each, (CLOCK + 60 * at, CLOCK + 60 * at))


class Kind(NamedTuple):
    """A trainer's run: what the name of its n-th entry is, and which files it writes in order.

    ``half`` says after how many files the save is killed; ``goes`` whether prune may tell its steps
    by their names; ``beside`` makes what lies beside the steps.
    """

    name: Callable[[int], str]
    files: Callable[[int], dict[str, Write]]
    half: int | None = 1
    goes: bool = True
    beside: Callable[[Path, int], object] = lambda run, newest: None
    staging: Callable[[int], str] | None = None


def one_file(state: object) -> Callable[[int], dict[str, Write]]:
    return lambda n: {"": saved(state)}


BOTH = {"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}


def trainer(n: int) -> dict[str, Write]:
    state: dict[str, Any] = {"global_step": n, "best_model_checkpoint": None, "log_history": []}
    return {
        "config.json": text('{"model_type": "llama"}'), "model.safetensors": weights,
        "training_args.bin": saved({}), "optimizer.pt": saved(OPTIMIZER),
        "scheduler.pt": saved({"last_epoch": n}), "rng_state.pth": saved({"cpu": torch.ones(2)}),
        "trainer_state.json": text(json.dumps(state)),
    }  # fmt: skip


def accelerate(n: int) -> dict[str, Write]:
    return {
        "model.safetensors": weights, "optimizer.bin": saved(OPTIMIZER),
        "scheduler.bin": saved({"last_epoch": n}),
        "random_states_0.pkl": saved({"step": n}), "random_states_1.pkl": saved({"step": n}),
    }  # fmt: skip


def lightning(n: int) -> dict[str, Write]:
    state = {"epoch": n, "global_step": 10 * n, "pytorch-lightning_version": "2.6.0"}
    return {"": saved(state | {"state_dict": {"w": WEIGHT}, "optimizer_states": [OPTIMIZER]})}


def verl(n: int) -> dict[str, Write]:
    inner = case("rank_verl").path / "global_step_5"
    files = sorted(path for path in inner.rglob("*") if path.is_file())
    return {str(path.relative_to(inner)): copy_of(path) for path in files} | {
        "data.pt": saved({"seen": n})
    }


def megatron(n: int) -> dict[str, Write]:
    inner = next(case("megatron_torch_dist").path.glob("iter_*"))
    names = sorted(inner.iterdir(), key=lambda path: path.name == "metadata.json")
    return {path.name: copy_of(path) for path in names}


def deepspeed(n: int) -> dict[str, Write]:
    inner = case("deepspeed_zero_2").path / "global_step1"
    return {path.name: copy_of(path) for path in sorted(inner.iterdir())}


def olmo(n: int) -> dict[str, Write]:
    return {
        "train/rank0.pt": saved({"step": n}), "model_and_optim": of_dcp("model", "optimizer"),
        ".metadata.json": text('{"version": "2.0"}'),
    }  # fmt: skip


def automodel(n: int) -> dict[str, Write]:
    return {"model": of_dcp("model"), "optim": of_dcp("optimizer"), "rng.pt": saved({"seed": n})}


def pointer(file: str, words: str) -> Callable[[Path, int], object]:
    return lambda run, newest: (run / file).write_text(words.format(newest))


def mmengine(n: int) -> dict[str, Write]:
    state = {"meta": {"epoch": n, "iter": 10 * n}, "state_dict": {"w": WEIGHT}}
    return {"": saved(state | {"optimizer": OPTIMIZER})}


def timm(n: int) -> dict[str, Write]:
    state = {"epoch": n, "arch": "vit", "state_dict": {"w": WEIGHT}, "optimizer": OPTIMIZER}
    return {"": saved(state | {"version": 2, "metric": 0.5})}


def nemo(n: int) -> dict[str, Write]:
    return {"weights": of_dcp("model", "optimizer"), "context/model.yaml": text("a: 1")}


def sharded(*parts: str) -> Callable[[int], dict[str, Write]]:
    return lambda n: {"": of_dcp(*parts)}


TRACKER = "latest_checkpointed_iteration.txt"
TRAINERS: dict[str, Kind] = {
    "torch": Kind("step_{}".format, sharded("model", "optimizer"), None),
    "torchtitan": Kind(
        "step-{}".format,
        sharded("model", "optimizer", "train_state", "dataloader"),
        None,
        staging="tmp_step-{}".format,
    ),
    "accelerate": Kind("checkpoint_{}".format, accelerate, 4),
    "transformers": Kind("checkpoint-{}".format, trainer, 5, staging="tmp-checkpoint-{}".format),
    "Lightning": Kind("epoch={}-val_loss=0.5.ckpt".format, lightning, None),
    "Lightning, steps": Kind(lambda n: f"epoch={n}-step={10 * n}.ckpt", lightning, None),
    "Composer": Kind(
        lambda n: f"ep{n}-ba{7 * n}-rank0.pt",
        one_file({"state": {"model": {"w": WEIGHT}, "optimizers": {"Adam": OPTIMIZER}}}),
        None,
    ),
    "mmengine": Kind(
        "epoch_{}.pth".format, mmengine, None, beside=pointer("last_checkpoint", "/w/epoch_{}.pth")
    ),
    "mmengine, iterations": Kind("iter_{}.pth".format, mmengine, None),
    "Ignite": Kind("checkpoint_{}.pt".format, one_file(BOTH), None, goes=False),
    "timm": Kind("checkpoint-{}.pth.tar".format, timm, None, staging=lambda n: "tmp.pth.tar"),
    "NeMo": Kind(lambda n: f"gpt--val_loss=0.{n}-step={n}-consumed_samples={8 * n}.0", nemo, None),
    "AutoModel": Kind("epoch_0_step_{}".format, automodel, 1),
    "DeepSpeed": Kind(
        "global_step{}".format, deepspeed, 1, beside=pointer("latest", "global_step{}")
    ),
    "Megatron-LM": Kind("iter_{:07d}".format, megatron, 1, beside=pointer(TRACKER, "{}")),
    "OLMo-core": Kind("step{}".format, olmo, 2, staging="step{}-tmp".format),
    "OLMo-core, stages": Kind("stage2-step{}".format, olmo, 2),
    "verl": Kind("global_step_{}".format, verl, 3, beside=pointer(TRACKER, "{}")),
}
"""One kind of run of each trainer, whose steps 1, 2 and 3 are whole."""


def run_of(folder: Path, kind: Kind, steps: tuple[int, ...] = (1, 2, 3)) -> Path:
    """Write a run of whole steps, one a minute."""
    run = folder / "run"
    run.mkdir(parents=True)
    for step in steps:
        write_step(run, kind, step)
    kind.beside(run, steps[-1])
    return run


def write_step(run: Path, kind: Kind, step: int, most: int | None = None, name: str = "") -> Path:
    path = run / (name or kind.name(step))
    files = kind.files(step)
    write(
        path.parent if [*files] == [""] else path,
        {n or path.name: w for n, w in files.items()},
        most,
    )
    age(path, step)
    return path
