"""A checkpoint of many layers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def save(path: Path, count: int, rows: int) -> Path:
    generator = torch.Generator().manual_seed(count)
    state = {f"layer.{n}": torch.randn(rows, 512, generator=generator) for n in range(count)}
    dcp.save(state | {"step": 3}, checkpoint_id=path, no_dist=True)
    return path
