"""FSDP2 saved and resumed by torchtune's CheckpointClient: its ``dist_epoch_0/`` is the checkpoint.

As torchtune's recipes call it where ``enable_async_checkpointing`` is on, without which it writes
no sharded checkpoint.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import LAST, SAVED, Job, spawn, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(path: str) -> Job:
    from omegaconf import OmegaConf
    from torchtune.training.checkpointing._checkpoint_client import (
        CheckpointClient,
        TrainingProgress,
    )

    logging.disable(logging.WARNING)
    world, place = dist.get_world_size(), Path(path)
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 10), torch.nn.Dropout(0.2 * (world == 2)), torch.nn.Linear(10, 1))
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    base = place.parent / "base"  # torchtune asks for the model that it starts from
    base.mkdir(parents=True, exist_ok=True)
    (base / "model.pt").touch()
    files = {"checkpoint_dir": str(base), "checkpoint_files": ["model.pt"]}
    settings = {
        "device": "cpu",
        "enable_async_checkpointing": True,
        "checkpointer": files
        | {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "model_type": "LLAMA3",
            "output_dir": str(place.parent),
        },
    }
    client = CheckpointClient(OmegaConf.create(settings))
    data = torch.randn(LAST, 8, 7, generator=torch.Generator().manual_seed(7))

    def loss(step: int) -> torch.Tensor:
        return (model(data[step, :, :6]) - data[step, :, 6:]).square().mean()

    def save() -> None:
        client.save_checkpoint(model, optimizer, TrainingProgress(9, 1, 3, SAVED), epoch=0)
        client._get_dcp_checkpointer()._checkpoint_future.result()

    def load() -> None:
        # a schedule that is built before changes the rate of the group that is then loaded
        found = client.load_distributed_checkpoint(model, optimizer)
        if (found["seed"], found["epochs_run"], found["total_epochs"]) != (9, 1, 3):
            raise ValueError(f"the progress came back as {found}")
        scheduler.step(SAVED)

    return Job(optimizer, scheduler, loss, save, load)


if __name__ == "__main__":
    spawn(partial(train, build))
