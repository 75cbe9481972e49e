"""What vLLM's loader makes of a sharded state."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def as_vllm_loads(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """All keys of a rank's parts, found and read as ``ShardedStateLoader`` does."""
    files = sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))
    assert files, "the loader refuses a rank without files"
    found: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert {*(file.metadata() or ())} <= {"ckptool.side"}
            for key in file.keys():  # noqa: SIM118
                assert key not in found
                found[key] = file.get_tensor(key)
    return found
