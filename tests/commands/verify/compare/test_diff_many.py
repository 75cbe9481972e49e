"""``ckptool diff`` of many names: what it costs to find what would fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import calls_of
from safetensors.numpy import save_file

import ckptool

LAYER = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("input_layernorm", "post_attention_layernorm"),
)
LAYERS = 300
Name = Callable[[int, str], str]

OTHERS: dict[str, Name] = {
    "unrelated": lambda layer, name: f"x{layer}.y{layer}.{name.replace('.', layer * '_')}",
    "torchtitan": lambda layer, name: f"layers.{layer}.attention.w{LAYER.index(name)}.weight",
    "prefixed": lambda layer, name: f"net.layers.{layer}.{name}.weight",
}
MOST = 600
"""Calls of functions for each name; it was 2,000 when each map was tried on all names."""


def saved(file: Path, name: Name) -> Path:
    names = [name(layer, each) for layer in range(LAYERS) for each in LAYER]
    save_file({each: np.zeros((2, 2), np.float32) for each in names}, file)
    return file


@pytest.mark.parametrize("other", OTHERS)
def test_disjoint_names_cost_little(other: str, tmp_path: Path) -> None:
    one = saved(tmp_path / "a.safetensors", lambda layer, n: f"model.layers.{layer}.{n}.weight")
    two = saved(tmp_path / "b.safetensors", OTHERS[other])
    ckptool.diff(one, two)  # loads the maps
    calls = calls_of(lambda: ckptool.diff(one, two))
    assert calls < MOST * LAYERS * len(LAYER)
