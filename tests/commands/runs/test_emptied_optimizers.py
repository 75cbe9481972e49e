"""Steps whose optimizer lost what it kept of parameters, and those that rightly keep nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prune_runs import fates, pruned
from safetensors.torch import save_file

import ckptool

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999)}


def optimizer(settings: dict[str, Any], state: dict[int, Any]) -> dict[str, Any]:
    return {"state": state, "param_groups": [{**settings, "params": [0, 1]}]}


def of_adam() -> dict[int, Any]:
    one = {"step": torch.tensor(1.0), "exp_avg": torch.randn(4, 4), "exp_avg_sq": torch.rand(4, 4)}
    return {0: one, 1: {name: tensor + 0.1 for name, tensor in one.items()}}


def save_step(run: Path, number: int, saved: dict[str, Any]) -> None:
    """What accelerate saves of a training."""
    step = run / f"checkpoint-{number}"
    step.mkdir(parents=True)
    torch.manual_seed(number)
    save_file({f"l.{n}.weight": torch.randn(4, 4) for n in "ab"}, step / "model.safetensors")
    torch.save(saved, step / "optimizer.bin")
    states = {"step": 0, "torch_manual_seed": torch.get_rng_state()}
    torch.save(states, step / "random_states_0.pkl")


@pytest.mark.parametrize(
    ("settings", "left", "good"),
    [
        pytest.param(ADAM, {}, 2, id="emptied"),
        pytest.param(ADAM, {"step": 3}, 2, id="all but a count"),
        pytest.param({"lr": 1e-3, "momentum": 0}, {}, 3, id="SGD from then on"),
    ],
)
def test_a_step_whose_optimizer_has_lost_all_state(
    settings: dict[str, Any], left: dict[Any, Any], good: int, tmp_path: Path
) -> None:
    for number in (1, 2):
        save_step(tmp_path, number, optimizer(ADAM, of_adam()))
    save_step(tmp_path, 3, optimizer(settings, left))
    for quick in (True, False):
        found = ckptool.verify_run(tmp_path, quick=quick).latest_good
        assert found is not None
        assert found.path.name == f"checkpoint-{good}"


def test_momentum_that_ends_leaves_no_state(tmp_path: Path) -> None:
    moving = {"lr": 1e-3, "momentum": 0.9}
    save_step(tmp_path, 1, optimizer(moving, {0: {"momentum_buffer": torch.randn(4, 4)}}))
    save_step(tmp_path, 2, optimizer({**moving, "momentum": 0}, {0: {"momentum_buffer": None}}))
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.path.name == "checkpoint-2"


def test_an_emptied_step_among_whole_ones_is_not_kept_for_them(tmp_path: Path) -> None:
    for number, state in [(1, of_adam()), (2, {}), (3, of_adam())]:
        save_step(tmp_path, number, optimizer(ADAM, state))
    assert fates(pruned(tmp_path, keep_last=2)) == {
        "checkpoint-1": "keep",
        "checkpoint-2": "leave",
        "checkpoint-3": "keep",
    }


@pytest.mark.parametrize(("counts", "good"), [((2, 0), 3), ((2, 3), 2), ((0, 0), 2)])
def test_an_optimizer_made_anew_before_its_first_step(
    counts: tuple[int, int], good: int, tmp_path: Path
) -> None:
    """Its scheduler was begun again, too; of one that counts epochs, nothing tells."""
    for number, state, count in [(2, of_adam(), counts[0]), (3, {}, counts[1])]:
        save_step(tmp_path, number, optimizer(ADAM, state))
        torch.save({"last_epoch": count}, tmp_path / f"checkpoint-{number}/scheduler.bin")
    found = ckptool.verify_run(tmp_path, every=True)
    assert found.latest_good is not None
    assert found.latest_good.path.name == f"checkpoint-{good}"
    if good == 2:
        assert found.steps[0].reasons == (
            "moments-zero: no optimizer's state, which checkpoint-2 has: a resume begins the"
            " optimizer again (--ignore moments-zero counts it as good)",
        )
    assert ckptool.verify_run(tmp_path, every=True, ignore=("moments-zero",)).ok


def test_an_optimizer_saved_as_an_object_is_one(tmp_path: Path) -> None:
    """Nothing of it is read, but a later step has lost it."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.rand(4, 4))])
    for step in (1, 2, 3):
        more = {"optimizer": optimizer} if step < 3 else {}
        torch.save({"model": {"w": torch.rand(4, 4)}} | more, tmp_path / f"step-{step}.pt")
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "step-2.pt"
    assert report.steps[0].reasons[0].startswith("moments-zero: no optimizer's state, ")
