"""Programs that write the models and the adapter of merges, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_WIDTH = 4096
_SQUARE = 2 * _WIDTH * _WIDTH
_LAYER = {
    "input_layernorm": [8192],
    "post_attention_layernorm": [8192],
    "self_attn.q_proj": [8192, 8192],
    "self_attn.k_proj": [1024, 8192],
    "self_attn.v_proj": [1024, 8192],
    "self_attn.o_proj": [8192, 8192],
    "mlp.gate_proj": [28672, 8192],
    "mlp.up_proj": [28672, 8192],
    "mlp.down_proj": [8192, 28672],
}
_ENDS = {"model.embed_tokens": [128256, 8192], "model.norm": [8192], "lm_head": [128256, 8192]}
"""The shapes of Llama 3 70B."""


def _modules(size: int) -> Iterator[tuple[str, int]]:
    """Yield the modules of a model of about ``size`` bytes, each with its rows."""
    count = max(1, size // _SQUARE)
    rows = max(1, size // count // (2 * _WIDTH))
    return ((f"model.layers.{number}.proj", rows) for number in range(count))


def write_model(path: str, size: int, seed: int) -> None:
    """Write about ``size`` bytes of bf16 in a safetensors file."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": torch.randn(rows, _WIDTH, generator=random).mul_(0.02).bfloat16()
        for name, rows in _modules(size)
    }
    save_file(tensors, path, {"format": "pt"})


def write_adapter(folder: str, size: int, rank: int) -> None:
    """Write a LoRA of every tensor of a model of ``size`` bytes, as PEFT has it."""
    import torch
    from safetensors.torch import save_file

    os.makedirs(folder)
    tensors = {}
    for name, rows in _modules(size):
        head = f"base_model.model.{name}"
        tensors[f"{head}.lora_A.weight"] = torch.randn(rank, _WIDTH).bfloat16()
        tensors[f"{head}.lora_B.weight"] = torch.randn(rows, rank).mul_(0.01).bfloat16()
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": ["proj"]}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))


def write_sparse(folder: str, size: int, layers: int) -> None:
    """Write a model of the shape of Llama 3 70B, a file a layer, whose bytes are holes.

    ``size`` is that of the other models, and not used.
    """
    os.makedirs(folder)
    files = [
        {f"model.layers.{number}.{name}.weight": shape for name, shape in _LAYER.items()}
        for number in range(layers)
    ]
    files.append({f"{name}.weight": shape for name, shape in _ENDS.items()})
    placed: dict[str, str] = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_holes(Path(folder, name), shapes)
        placed |= dict.fromkeys(shapes, name)
    index = {"metadata": {}, "weight_map": placed}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))


def write_names(folder: str, tensors: int) -> None:
    """Write two equal safetensors files of so many tensors of 64 bytes."""
    os.makedirs(folder)
    path = Path(folder, "one.safetensors")
    _write_holes(path, {f"model.layers.{number}.weight": [32] for number in range(tensors)})
    shutil.copy(path, Path(folder, "other.safetensors"))


def _write_holes(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bf16 with its header alone, and its full length."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if shape[1:] else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
