"""FSDP2 saved and resumed by verl's FSDPCheckpointManager."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks import LAST, Job, spawn, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(path: str) -> Job:
    from omegaconf import OmegaConf
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 37}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
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
    Path(path).mkdir(parents=True, exist_ok=True)
    data = torch.randint(0, 37, (LAST, 4, 8), generator=torch.Generator().manual_seed(7))
    return Job(
        optimizer,
        scheduler,
        loss=lambda step: model(data[step], labels=data[step]).loss,
        save=lambda: manager.save_checkpoint(path, global_step=2),
        load=lambda: manager.load_checkpoint(path),
    )


if __name__ == "__main__":
    spawn(partial(train, build))
