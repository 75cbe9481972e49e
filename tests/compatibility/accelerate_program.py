"""FSDP2 saved and resumed by accelerate's functions; an ``Accelerator`` has no FSDP on a CPU."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks import LAST, Job, spawn, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)


def build(path: str) -> Job:
    """Dropout is on with 2 ranks alone: on other numbers of ranks it draws other numbers."""
    from accelerate import checkpointing
    from accelerate.utils import fsdp_utils

    fsdp_utils.logger = checkpointing.logger = logging.getLogger("accelerate")
    rank, world = dist.get_rank(), dist.get_world_size()
    plugin, accelerator = stand_ins(rank, world)
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 10), torch.nn.Dropout(0.2), torch.nn.Linear(10, 1))
    model = torch.nn.Sequential(*layers).train(world == 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    data = torch.randn(LAST, 8, 7, generator=torch.Generator().manual_seed(7))

    def loss(step: int) -> torch.Tensor:
        return (model(data[step, :, :6]) - data[step, :, 6:]).square().mean()

    def save() -> None:
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, path)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
        checkpointing.save_accelerator_state(path, [], [], [scheduler], [], rank, 3)

    def load() -> None:
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, path)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
        checkpointing.load_accelerator_state(path, [], [], [scheduler], [], rank)

    return Job(optimizer, scheduler, loss, save, load)


def stand_ins(rank: int, world: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=ShardedStateDictConfig(),
        optim_state_dict_config=ShardedOptimStateDictConfig(),
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        process_index=rank,
        num_processes=world,
        is_main_process=rank == 0,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
        should_save_model=True,
        unwrap_model=lambda model, **_: model,
        parallelism_config=None,
        device=torch.device("cpu"),
    )
    return plugin, accelerator


if __name__ == "__main__":
    spawn(partial(train, build))
