"""Weights that something else moves than the optimizer beside them, or nothing yet."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool

SHAPES = ((16, 32), (32, 32), (32, 8))


class Trained:
    """A model whose gradients have a size for each of its elements, and its optimizer."""

    def __init__(self, seed: int) -> None:
        self.noise = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(*shape) for shape in SHAPES))
        self.scales = [self._random(p.shape).exp() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data.copy_(self._random(parameter.shape))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.noise)

    def step(self) -> None:
        for parameter, scale in zip(self.model.parameters(), self.scales, strict=True):
            parameter.grad = self._random(parameter.shape) * scale
        self.optimizer.step()

    def take(self, other: Trained, *, whole: bool) -> None:
        """Go on from another's model, and its optimizer if ``whole``."""
        self.model.load_state_dict(other.model.state_dict())
        self.scales = other.scales
        if whole:
            self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))

    def save(self, run: Path, step: int, **others: Any) -> None:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**states, **others, "step": step}, run / f"ckpt_{step}.pt")


def reasons(run: Path) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


@pytest.mark.parametrize("whole", [True, False])
def test_a_trial_that_goes_on_from_another_one(whole: bool, tmp_path: Path) -> None:
    """Population-based training copies the optimizer, too, as Ray Tune does."""
    one, other = Trained(0), Trained(1)
    for step in range(1, 51):
        one.step()
        other.step()
        if step == 35:
            one.take(other, whole=whole)
        if step % 10 == 0:
            one.save(tmp_path, step)
    found = reasons(tmp_path)
    assert [*found] == ([] if whole else ["ckpt_40.pt"])
    assert all(why.startswith("weights-unrelated: ") for why in found.values())


def test_a_training_that_was_begun_again(tmp_path: Path) -> None:
    """Its optimizer is made anew as well, and counts from the beginning."""
    one = Trained(0)
    for step in range(1, 51):
        one.step()
        if step == 35:
            one = Trained(1)
        if step % 10 == 0:
            one.save(tmp_path, step)
    found = reasons(tmp_path)
    assert "ckpt_40.pt" in found
    assert found["ckpt_40.pt"].startswith("weights-unrelated: ")


@pytest.mark.parametrize("has_outer", [True, False])
def test_weights_that_an_outer_optimizer_moves(has_outer: bool, tmp_path: Path) -> None:
    """DiLoCo saves what its outer optimizer has moved, beside the inner one that goes on."""
    inner, outer = Trained(0), Trained(0)
    outer.optimizer = torch.optim.SGD(outer.model.parameters(), lr=0.7, momentum=0.9)
    for step in range(1, 51):
        inner.step()
        if step % 20 == 1:
            outer.step()
        if step % 10 == 0:
            states = {"model": outer.model.state_dict(), "optimizer": inner.optimizer.state_dict()}
            outers = {"outer_optimizer": outer.optimizer.state_dict()} if has_outer else {}
            torch.save(states | outers | {"step": step}, tmp_path / f"ckpt_{step}.pt")
    assert [*reasons(tmp_path)] == ([] if has_outer else ["ckpt_40.pt", "ckpt_20.pt"])


@pytest.mark.parametrize("waits", [True, False])
def test_an_optimizer_that_only_gathers_gradients_at_first(waits: bool, tmp_path: Path) -> None:
    """AdaShift (pytorch_optimizer 3.5) has no squares until it has kept some gradients."""
    trained = Trained(0)
    begun = deepcopy(trained.model.state_dict())
    for step in range(1, 4):
        trained.step()
        trained.model.load_state_dict(begun)
        for state in trained.optimizer.state.values() if waits else ():
            state["exp_avg_sq"].zero_()
        trained.optimizer.param_groups[0]["keep_num"] = 10
        trained.save(tmp_path, step)
    assert [*reasons(tmp_path)] == ([] if waits else ["ckpt_3.pt", "ckpt_2.pt"])


@pytest.mark.parametrize("old", [0, 2, None])
@pytest.mark.parametrize("trained", [True, False])
def test_an_adapter_of_an_earlier_step(trained: bool, old: int | None, tmp_path: Path) -> None:
    """torchtune 0.6 saves it beside the model that it was merged into."""
    torch.manual_seed(0)
    base = {f"model.layers.{n}.up_proj.weight": torch.randn(32, 32) for n in range(3)}
    halves = {
        f"base_model.{name.removesuffix('.weight')}.lora_{half}.weight": torch.randn(*shape)
        for name in base
        for half, shape in (("A", (4, 32)), ("B", (32, 4)))
    }
    for epoch in range(4):
        if trained or not epoch:
            halves = {n: w + 0.01 * torch.randn_like(w) for n, w in halves.items()}
        base = {n: w + 0.01 * torch.randn_like(w) for n, w in base.items()}
        (folder := tmp_path / f"epoch_{epoch}").mkdir()
        save_file(base, folder / (shard := "model-00001-of-00001.safetensors"), {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(base, shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(halves, folder / "adapter_model.safetensors", {"format": "pt"})
    if old is not None:
        shutil.copy(tmp_path / f"epoch_{old}/adapter_model.safetensors", tmp_path / "epoch_3")
    found = reasons(tmp_path)
    assert [*found] == (["epoch_3"] if trained and old is not None else [])
    why = f"counts-differ: adapter_model.safetensors: its weights are those of epoch_{old}, but not"
    assert all(reason.startswith(why) for reason in found.values())
