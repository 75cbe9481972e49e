"""Weights that are zero where those of other layers are not, and those that rightly are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from verify.verify_runs import checked

from ckptool.commands.verify.findings import Finding

States = dict[str, torch.Tensor]


def layers(count: int = 4, part: str = "mlp.up.weight", dtype: torch.dtype | None = None) -> States:
    generator = torch.Generator().manual_seed(1)
    return {
        f"model.layers.{layer}.{part}": torch.randn(1024, 512, generator=generator).to(dtype)
        for layer in range(count)
    }


def zeroed(state: States, *names: str) -> States:
    return {n: torch.zeros_like(t) if n in names else t for n, t in state.items()}


def found(path: Path) -> list[Finding]:
    return [finding for finding in checked(path).findings if finding.code == "weight-zero"]


SAVES: dict[str, Callable[[States, Path], object]] = {
    "m.safetensors": lambda state, path: save_file(state, path),
    "m.pt": lambda state, path: torch.save(state, path),
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAVES)
def test_a_layer_of_zeros_is_one_finding(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = layers(dtype=dtype) | layers(part="mlp.down.weight", dtype=dtype)
    state["embed.weight"] = torch.zeros(1024, 512, dtype=dtype)
    SAVES[name](state, tmp_path / name)
    assert not found(tmp_path / name)
    lost = zeroed(state, "model.layers.2.mlp.up.weight", "model.layers.2.mlp.down.weight")
    (tmp_path / "lost").mkdir()
    SAVES[name](lost, tmp_path / "lost" / name)
    (finding,) = found(tmp_path / "lost" / name)
    text = "model.layers.2.mlp.{0}.weight: all values are zero, but of none of 3 others like"
    text += " model.layers.#.mlp.{0}.weight"
    assert {each.message for each in finding.affected} == {text.format(w) for w in ("up", "down")}
    assert len(finding.affected) == 2
    assert checked(tmp_path / "lost" / name).ok


@pytest.mark.parametrize(
    "made",
    [
        lambda: {name: torch.zeros(1024, 512) for name in layers()},  # a kind that begins as zeros
        lambda: zeroed(layers(2), "model.layers.0.mlp.up.weight"),  # one of two: which is wrong?
        lambda: zeroed(layers(part="lora_B.weight"), "model.layers.0.lora_B.weight"),
        lambda: {**layers(), "model.layers.4.mlp.up.weight": torch.zeros(4, 4)},
        lambda: {
            **{f"model.layers.{i}.bias": torch.ones(1 << 19) for i in range(4)},
            "model.layers.4.bias": torch.zeros(1 << 19),
        },
        lambda: {**layers(), "model.layers.4.mlp.up.weight": -torch.zeros(1024, 512)},
        lambda: {
            **layers(),
            "model.layers.4.mlp.up.weight": torch.eye(1024, 512).roll(511, 1) * 1e-40,
        },
    ],
)
def test_zeros_that_may_be_right_are_none(made: Callable[[], States], tmp_path: Path) -> None:
    save_file(made(), tmp_path / "m.safetensors")
    assert not found(tmp_path / "m.safetensors")


def test_moments_of_experts_that_were_never_chosen_are_none(tmp_path: Path) -> None:
    moments = zeroed(layers(part="exp_avg"), "model.layers.1.exp_avg")
    state = {
        "model": layers(),
        "optimizer": {"state": {n: {"exp_avg": t} for n, t in moments.items()}},
    }
    torch.save(state, tmp_path / "m.pt")
    assert not found(tmp_path / "m.pt")


def test_one_value_in_the_last_tile_is_enough(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.ones(3, 1 << 20) for i in range(3)}
    state["layers.3.w"] = torch.zeros(3, 1 << 20)
    state["layers.3.w"][2, -1] = -1
    save_file(state, tmp_path / "m.safetensors")
    assert not found(tmp_path / "m.safetensors")
    state["layers.3.w"][2, -1] = 0
    save_file(state, tmp_path / "m.safetensors")
    assert [finding.tensor for finding in found(tmp_path / "m.safetensors")] == ["layers.3.w"]
