"""Pairs of files to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from verify.compare.compared import state


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Two safetensors files, the second changed."""

    def save(change: Callable[[dict[str, torch.Tensor]], None]) -> tuple[Path, Path]:
        one, other = state(), state()
        change(other)
        save_file(one, tmp_path / "one.safetensors")
        save_file(other, tmp_path / "other.safetensors")
        return tmp_path / "one.safetensors", tmp_path / "other.safetensors"

    return save
