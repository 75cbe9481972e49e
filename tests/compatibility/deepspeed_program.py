"""A stage of ZeRO saved by DeepSpeed, and resumed from its folder or from a universal checkpoint.

The stage is the last argument.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
# up to 0.15 it relies on what torch.load did before torch 2.6: it loaded any class
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
import deepspeed
import torch
from ranks import FORGOTTEN, LAST, SAVED, spawn


def train(mode: str, path: str, rank: int, world: int) -> Any:
    """Return the losses, the schedule's epoch, and what was forgotten."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    # gloo is enough: what it would compile for shared memory needs a compiler and a minute
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    universal = Path(path, "latest_universal").exists()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": int(sys.argv[4])},
        "checkpoint": {"load_universal": universal},
    }
    engine, *_, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        config=config,
    )
    forgotten = None
    if mode == "resume":
        found, _ = engine.load_checkpoint(path)
        forgotten = None if found and all(optimizer.state.values()) else FORGOTTEN
    data = torch.randn(LAST, 8, 7, generator=torch.Generator().manual_seed(7))
    losses = []
    for step in range(SAVED) if mode == "write" else range(SAVED, LAST):
        loss = (engine(data[step, :, :6]) - data[step, :, 6:]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    if mode == "write":
        engine.save_checkpoint(path)
    return losses, scheduler.last_epoch, forgotten


if __name__ == "__main__":
    spawn(train)
