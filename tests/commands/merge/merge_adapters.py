"""Adapters and bases that tests make, and the command that merges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.errors import CkptoolError

Tensors = dict[str, torch.Tensor]
_HEAD = "base_model.model."


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *map(str, words)])
    if isinstance(result.exception, CkptoolError):
        error = result.exception
        return error.exit_code, f"{error} {error.hint}"
    return result.exit_code, " ".join(result.output.split())


def save_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    save_file({_HEAD + n: t for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return folder


def save_base(path: Path, tensors: Tensors) -> Path:
    save_file(tensors, path, {"format": "pt"})
    return path


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(module: str, outputs: int, inputs: int, rank: int = 4, seed: int = 1) -> Tensors:
    left, right = some(outputs, rank, seed=seed), some(rank, inputs, seed=seed + 1)
    return {f"{module}.lora_A.weight": right, f"{module}.lora_B.weight": left}
