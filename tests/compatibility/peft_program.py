"""A LoRA adapter under FSDP2, and the logits with it: as trained, or as PEFT loads it.

``write`` saves the model and the adapter on it with DCP; ``resume`` loads that on as many ranks, or
what ckptool takes out of it with ``--peft-adapter``, as PEFT's users do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 37}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


def program(mode: str, path: str, rank: int, world: int) -> Any:
    """Train two steps and save, or load; return the logits."""
    config = LoraConfig(
        r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
    )
    tokens = torch.randint(0, 37, (4, 8), generator=torch.Generator().manual_seed(7))
    if Path(path, "adapter_model.safetensors").exists():
        model = PeftModel.from_pretrained(base(), path)
    else:
        model = get_peft_model(base(), config)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = {"model": model.state_dict()}
        if mode == "write":
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
            for _ in range(2):
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
            dcp.save({"model": model.state_dict()}, checkpoint_id=path)
            config.save_pretrained(path) if rank == 0 else None
        else:
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
    with torch.no_grad():
        return model.eval()(tokens).logits.flatten().tolist()


if __name__ == "__main__":
    spawn(program)
