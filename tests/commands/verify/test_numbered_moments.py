"""Moments of parameters that have numbers alone: the order of the model's tells their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from verify.test_moments import KINDS_OF, found, layers

import ckptool

State = dict[int, dict[str, torch.Tensor]]
Groups = Callable[[torch.nn.Module], Iterable[Any]]


def of_all(model: torch.nn.Module) -> Iterable[Any]:
    return model.parameters()


def by_decay(model: torch.nn.Module) -> Iterable[Any]:
    every = list(model.parameters())
    matrices, others = ([p for p in every if (p.ndim > 1) is kind] for kind in (True, False))
    return [{"params": matrices}, {"params": others}]


def trained(groups: Groups = of_all) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of four layers, each of two matrices, and the state of their optimizer."""
    torch.manual_seed(1)
    model = layers()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
    weights = {f"layers.{name}": weight for name, weight in model.state_dict().items()}
    return weights, optimizer.state_dict()


def zero(state: State, number: int) -> None:
    for kind in KINDS_OF:
        state[number][kind].zero_()


def copy(state: State, one: int, other: int) -> None:
    for kind in KINDS_OF:
        state[other][kind].copy_(state[one][kind])


CHANGES = [
    (of_all, lambda state: zero(state, 4), "moments-zero", 4),
    (by_decay, lambda state: zero(state, 2), "moments-zero", 2),
    (of_all, lambda state: copy(state, 4, 12), "moments-copied", 12),
    (by_decay, lambda state: copy(state, 3, 5), "moments-copied", 5),
    (of_all, lambda state: None, "", 0),
    (by_decay, lambda state: None, "", 0),
]


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize(("groups", "change", "code", "number"), CHANGES)
def test_moments_of_one_number(
    groups: Groups,
    change: Callable[[State], None],
    code: str,
    number: int,
    is_beside: bool,
    tmp_path: Path,
) -> None:
    weights, optimizer = trained(groups)
    change(optimizer["state"])
    head = "optimizer.state"
    path = tmp_path / "checkpoint-3"
    if is_beside:  # as transformers' Trainer saves them
        path.mkdir()
        save_file(weights, path / "model.safetensors")
        torch.save(optimizer, path / "optimizer.pt")
        (path / "trainer_state.json").write_text('{"global_step": 3}')
        head = "optimizer.pt: state"
    else:
        path = tmp_path / "c.pt"
        torch.save({"model": weights, "optimizer": optimizer}, path)
    findings = found(path)
    assert [each.code for each in findings] == [code] * bool(code)
    assert all(f"{head}.{number}.exp_avg" in each.message for each in findings)
    if is_beside:
        (step,) = ckptool.verify_run(tmp_path).steps
        assert bool(step.reasons) is bool(code)


def test_parameters_that_a_model_has_more_or_less_of_are_not_named(tmp_path: Path) -> None:
    weights, optimizer = trained()
    zero(optimizer["state"], 4)
    del weights["layers.3.up.weight"]
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "c.pt")
    assert not found(tmp_path / "c.pt")


def test_numbers_below_a_state_of_all(tmp_path: Path) -> None:
    """As Composer saves: the state of an optimizer is inside another one."""
    weights, optimizer = trained()
    zero(optimizer["state"], 4)
    state = {"state": {"model": weights, "optimizers": {"AdamW": optimizer}}}
    torch.save(state, tmp_path / "c.pt")
    (finding,) = found(tmp_path / "c.pt")
    assert finding.message.startswith("state.optimizers.AdamW.state.4.exp_avg: ")


def test_two_optimizers_each_have_numbers_of_their_own(tmp_path: Path) -> None:
    (weights, optimizer), (others, other) = trained(), trained(by_decay)
    zero(other["state"], 2)
    state = {"model": weights, "optimizer": optimizer, "critic": others, "critic_optimizer": other}
    torch.save(state, tmp_path / "c.pt")
    (finding,) = found(tmp_path / "c.pt")
    assert finding.message.startswith("critic_optimizer.state.2.exp_avg: ")
