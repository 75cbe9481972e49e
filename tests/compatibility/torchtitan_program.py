"""FSDP2 saved and resumed by torchtitan's CheckpointManager: its ``step-2/`` is the checkpoint."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import LAST, SAVED, Job, spawn, train
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Progress(Stateful):
    """Holds a step and losses, as torchtitan's own trainer does."""

    def __init__(self) -> None:
        self.step, self.losses = SAVED, torch.arange(3.0)

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["step"] != SAVED or not torch.equal(state["losses"], torch.arange(3.0)):
            raise ValueError(f"train_state came back as {state}")


def build(path: str) -> Job:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    logging.disable(logging.WARNING)
    world = dist.get_world_size()
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 10), torch.nn.Dropout(0.2 * (world == 2)), torch.nn.Linear(10, 1))
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1}
    )
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: 0.9**step)
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, folder=str(Path(path).parent), interval=SAVED, keep_latest_k=0
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": Progress()},
        sd_adapter=None,
    )
    data = torch.randn(LAST, 8, 7, generator=torch.Generator().manual_seed(7))

    def loss(step: int) -> torch.Tensor:
        return (model(data[step, :, :6]) - data[step, :, 6:]).square().mean()

    def load() -> None:
        if not manager.load(SAVED):
            raise ValueError(f"torchtitan found no step {SAVED} in {path}")

    return Job(optimizers, schedulers, loss, lambda: manager.save(SAVED) or None, load)


if __name__ == "__main__":
    spawn(partial(train, build))
