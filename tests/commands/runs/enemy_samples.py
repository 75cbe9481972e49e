"""Tiny checkpoints of many kinds, made once, of which generated runs are copied together.

A sample is a file or a folder. Its number is the step it records; ``nan`` puts a NaN into the
model. Samples of fixtures are those of the real writers, whatever their number.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from safetensors.torch import save_file


def weights(number: int, *, nan: bool = False) -> dict[str, torch.Tensor]:
    values = {"weight": torch.full((4, 3), 0.5 + number), "bias": torch.arange(3.0) + number}
    if nan:
        values["weight"][1, 1] = float("nan")
    return values


def optimizer(number: int) -> dict[str, object]:
    """What ``AdamW.state_dict`` returns for these weights."""
    state = {
        at: {
            "step": torch.tensor(float(number)),
            "exp_avg": torch.ones(*shape),
            "exp_avg_sq": torch.ones(*shape),
        }
        for at, shape in enumerate(((4, 3), (3,)))
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def _named_optimizer(number: int) -> dict[str, object]:
    state = {
        name: {"step": torch.tensor(float(number)), "exp_avg": torch.ones_like(weight)}
        for name, weight in weights(number).items()
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def _dcp(path: Path, **state: object) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def _safetensors(path: Path, number: int, nan: bool) -> None:
    save_file(weights(number, nan=nan), path, {"format": "pt"})


def _lightning(path: Path, number: int, nan: bool) -> None:
    state = {
        "epoch": number,
        "global_step": 10 * number,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": weights(number, nan=nan),
        "optimizer_states": [optimizer(number)],
        "lr_schedulers": [],
    }
    torch.save(state, path)


def _state(path: Path, number: int, nan: bool) -> None:
    model = weights(number, nan=nan)
    torch.save({"model": model, "optimizer": optimizer(number), "epoch": number}, path)


KINDS: dict[str, Callable[[Path, int, bool], object]] = {
    "dcp": lambda p, n, nan: _dcp(
        p, model=weights(n, nan=nan), optimizer=_named_optimizer(n), step=n
    ),
    "dcp_model": lambda p, n, nan: _dcp(p, model=weights(n, nan=nan)),
    "dcp_optim": lambda p, n, nan: _dcp(p, optimizer=_named_optimizer(n)),
    "dcp_data": lambda p, n, nan: _dcp(p, dataloader={"position": torch.tensor([n])}),
    "safetensors": _safetensors,
    "lightning": _lightning,
    "state": _state,
    "weights_pt": lambda p, n, nan: torch.save({"model": weights(n, nan=nan)}, p),
    "bare_pt": lambda p, n, nan: torch.save(weights(n, nan=nan), p),
    "optim_pt": lambda p, n, nan: torch.save(optimizer(n), p),
    "scheduler": lambda p, n, nan: torch.save({"last_epoch": n, "_step_count": n + 1}, p),
    "rng": lambda p, n, nan: torch.save({"cpu": torch.get_rng_state(), "python": n}, p),
    "random_states": lambda p, n, nan: torch.save(
        {"step": n, "torch_manual_seed": torch.get_rng_state()}, p
    ),
    "args": lambda p, n, nan: torch.save({"lr": 0.1}, p),
    "data_pt": lambda p, n, nan: torch.save({"_snapshot": {"_last_yielded": n}}, p),
    "train_state": lambda p, n, nan: torch.save({"step": torch.tensor(n)}, p),
    "bridge": lambda p, n, nan: torch.save({"step": torch.tensor(100 * n)}, p),
    "trainer_state": lambda p, n, nan: p.write_text(json.dumps({"global_step": 10 * n})),
    "trainer_state_of_step": lambda p, n, nan: p.write_text(json.dumps({"global_step": n})),
    "tag": lambda p, n, nan: p.write_text(f"global_step{n}"),
    "config": lambda p, n, nan: p.write_text('{"model_type": "llama"}'),
}
FIXTURES = {
    "deepspeed": ("deepspeed_zero_2", "global_step1"),
    "torch_dist": ("megatron_torch_dist", "iter_0000100"),
    "megatron_torch": ("megatron_torch", "iter_0000100"),
    "verl": ("rank_verl", "global_step_5/actor"),
    "local_0": ("megatron_local", "0/iter_0000100_0_local.pt"),
    "local_1": ("megatron_local", "1/iter_0000100_1_local.pt"),
    "torch_checkpointing": ("torch_checkpointing_safetensors", ""),
    "orbax": ("orbax", ""),
    "dcp_lightning": ("dcp_lightning", ""),
}


class Samples:
    """Makes each sample at its first use, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, kind: str, number: int, target: Path, *, nan: bool = False) -> None:
        """Copy a sample to a path, whose folder is made if need be."""
        source = self._made(kind, number, nan)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)

    def _made(self, kind: str, number: int, nan: bool) -> Path:
        if kind in FIXTURES:
            fixture, part = FIXTURES[kind]
            return case(fixture).path / part
        path = self._folder / f"{kind}-{number}-{nan}"
        if not path.exists():
            KINDS[kind](path, number, nan)
        return path
