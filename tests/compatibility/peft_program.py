"""A LoRA adapter under FSDP2 or ZeRO 3, and the logits with it: as trained, or as PEFT loads it.

``write`` saves the model and the adapter on it with DCP, or DeepSpeed; ``resume`` loads that on as
many ranks, or what ckptool takes out of it with ``--peft-adapter``, as PEFT's users do. The last
argument says which of the two it is: ``fsdp2`` or ``zero-3``.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import SAVED, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LoraConfig(
    r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
)


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 37}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


def program(mode: str, path: str, rank: int, world: int) -> Any:
    """Train and save, or load; return the logits."""
    tokens = torch.randint(0, 37, (4, 8), generator=torch.Generator().manual_seed(7))
    if Path(path, "adapter_model.safetensors").exists():
        model = PeftModel.from_pretrained(base(), path)
    else:
        trained = {"fsdp2": fsdp2, "zero-3": zero_3}[sys.argv[4]]
        model = trained(mode, path, rank, world, tokens)
    if mode == "write" and rank == 0:
        CONFIG.save_pretrained(path)
    model.eval()
    with torch.no_grad():
        return model(tokens).logits.flatten().tolist()


def fsdp2(mode: str, path: str, rank: int, world: int, tokens: torch.Tensor) -> Any:
    model = get_peft_model(base(), CONFIG)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict()}
    if mode == "resume":
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        return model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(SAVED):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return model


def zero_3(mode: str, path: str, rank: int, world: int, tokens: torch.Tensor) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    import deepspeed

    # gloo is enough: what it would compile for shared memory needs a compiler and a minute
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    model = get_peft_model(base(), CONFIG)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if mode == "resume":
        engine.load_checkpoint(path)
        return engine
    for _ in range(SAVED):
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(path)
    return engine


if __name__ == "__main__":
    spawn(program)
