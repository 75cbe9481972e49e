"""FSDP2 saved and resumed by verl's FSDPCheckpointManager."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import LAST, start, steps_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(mode: str, path: str) -> Any:
    """Return the losses, and the next random numbers where ranks are as many as saved."""
    from omegaconf import OmegaConf
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 37}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    tokenizer = SimpleNamespace(
        save_pretrained=lambda folder: Path(folder, "tokenizer_config.json").write_text("{}")
    )
    contents = ["model", "optimizer", "extra"]
    manager = FSDPCheckpointManager(
        model,
        optimizer,
        scheduler,
        processing_class=tokenizer,
        checkpoint_config=OmegaConf.create({"save_contents": contents, "load_contents": contents}),
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank + 9 * (mode == "write"))
    if mode == "resume":
        manager.load_checkpoint(path)
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(0, 37, (LAST, 4, 8), generator=generator)
    losses = []
    for step in steps_of(mode):
        loss = model(data[step], labels=data[step]).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    if mode == "write":
        manager.save_checkpoint(path, global_step=2)
    draws = [torch.rand(1).item(), random.random(), np.random.rand()]
    return losses, draws if world == 2 else None, scheduler.last_epoch


if __name__ == "__main__":
    start(train)
