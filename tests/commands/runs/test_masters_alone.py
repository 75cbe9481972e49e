"""Steps of DeepSpeed's ZeRO 3, whose trained weights are masters alone, and their counts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool

State = dict[str, Any]
FILE = "{0}zero_pp_rank_0_mp_rank_00_{1}_states.pt"
OPTIMIZER, MODEL = FILE.format("bf16_", "optim"), FILE.format("", "model")
SHAPES = {f"layers.{n}.{part}.weight": (16, 32) for n in range(3) for part in ("up", "gate")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Train a model with a frozen embedding on one rank, and save some steps."""
    torch.manual_seed(0)
    frozen = torch.randn(16, 32).bfloat16()
    weights = [torch.nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES.values()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    for step in range(1, 41):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        if step % 10 == 0:
            save(tmp_path / f"global_step{step}", step, weights, optimizer, frozen)
    return tmp_path


def save(
    folder: Path,
    step: int,
    weights: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    frozen: torch.Tensor,
) -> None:
    folder.mkdir()
    states = [optimizer.state[weight] for weight in weights]
    state: State = {
        kind: torch.cat([each[kind].flatten() for each in states])
        for kind in ("exp_avg", "exp_avg_sq")
    }
    state["step"] = float(step)
    inner = {
        "zero_stage": 3,
        "partition_count": 1,
        "optimizer_state_dict": {
            "state": {0: state},
            "param_groups": [{"params": [0], "lr": 1e-3, "betas": (0.9, 0.999)}],
        },
        "fp32_flat_groups": [torch.cat([weight.detach().flatten() for weight in weights])],
    }
    torch.save({"optimizer_state_dict": inner}, folder / OPTIMIZER)
    model = {
        "module": {name: torch.zeros(0) for name in ("embed.weight", *SHAPES)},
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "frozen_param_shapes": {"embed.weight": frozen.shape},
        "frozen_param_fragments": {"embed.weight": frozen.flatten()},
        "dp_world_size": 1,
        "global_steps": step,
        "skipped_steps": 0,
        "lr_scheduler": {"last_batch_iteration": step - 1},
    }
    torch.save(model, folder / MODEL)


def change(run: Path, **changes: Any) -> None:
    """Give the optimizer of the last step another part, as by the name of this."""
    file = run / "global_step40" / OPTIMIZER
    content = torch.load(file)
    content["optimizer_state_dict"] |= changes
    torch.save(content, file)


def change_counts(run: Path, step: int = 40, **counts: Any) -> None:
    file = run / f"global_step{step}" / MODEL
    torch.save(torch.load(file, weights_only=False) | counts, file)


def part_of(run: Path, step: int, part: str) -> Any:
    return torch.load(run / f"global_step{step}" / OPTIMIZER)["optimizer_state_dict"][part]


def reasons(run: Path) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


def test_frozen_weights_are_not_all_that_there_is(run: Path) -> None:
    assert reasons(run) == {}


def test_masters_of_a_step_before(run: Path) -> None:
    change(run, fp32_flat_groups=part_of(run, 30, "fp32_flat_groups"))
    found = reasons(run)
    assert found.keys() == {"global_step40"}
    assert "its weights are those of global_step30, but not its optimizer" in str(found)


def test_an_optimizer_of_a_step_before(run: Path) -> None:
    change(run, optimizer_state_dict=part_of(run, 30, "optimizer_state_dict"))
    assert "its optimizer is that of global_step30, but not its weights" in str(reasons(run))


def test_exchanged_layers(run: Path) -> None:
    (masters,) = part_of(run, 40, "fp32_flat_groups")
    layers = masters.reshape(3, -1)
    change(run, fp32_flat_groups=[layers[[1, 0, 2]].flatten()])
    assert "fp32.layers.0.up.weight: has the values that fp32.layers.1.up.weight" in str(
        reasons(run)
    )


def test_a_model_file_of_a_step_before(run: Path) -> None:
    shutil.copy(run / "global_step30" / MODEL, run / "global_step40")
    why = "global_steps is 30, as in global_step30, but the optimizer has gone on by 10"
    assert why in str(reasons(run))


def test_a_scheduler_of_a_step_before(run: Path) -> None:
    change_counts(run, lr_scheduler={"last_batch_iteration": 29})
    why = "lr_scheduler.last_batch_iteration is 30, as in global_step30, but"
    assert why in str(reasons(run))


def test_large_counts_are_said_in_full(run: Path) -> None:
    for step in (20, 30, 40):
        scheduler = {"last_batch_iteration": min(step, 30) * 1_000_001 - 1}
        change_counts(run, step, global_steps=step * 1_000_001, lr_scheduler=scheduler)
    assert "is 30,000,030, as in global_step30, but global_steps has gone on by 10,000,010" in str(
        reasons(run)
    )


def test_counts_that_no_float_holds(run: Path) -> None:
    state = part_of(run, 40, "optimizer_state_dict")
    state["state"][0]["step"] = 10**400
    change(run, optimizer_state_dict=state)
    change_counts(run, lr_scheduler={"last_batch_iteration": 29})
    assert "is 30, as in global_step30, but global_steps has gone" in str(reasons(run))
    for step in (30, 40):
        change_counts(run, step, global_steps=10 + step * 10**400, lr_scheduler=None)
    assert "global_step40" not in reasons(run)


def test_a_scheduler_that_was_begun_again(run: Path) -> None:
    change_counts(run, lr_scheduler={"last_batch_iteration": 9})
    assert reasons(run) == {}


def test_a_scheduler_that_was_begun_again_at_a_step_that_is_removed(run: Path) -> None:
    change_counts(run, global_steps=50, lr_scheduler={"last_batch_iteration": 19})
    (run / "global_step40").rename(run / "global_step50")
    shutil.rmtree(run / "global_step30")
    assert reasons(run) == {}


@pytest.mark.parametrize("skipped", [0, 10])
def test_all_partitions_of_a_step_before(skipped: int, run: Path) -> None:
    shutil.copy(run / "global_step30" / OPTIMIZER, run / "global_step40")
    scheduler = {"last_batch_iteration": 39 - skipped}
    change_counts(run, skipped_steps=skipped, lr_scheduler=scheduler)
    why = "its weights and its optimizer are those of global_step30, but global_steps counts 10"
    assert (why in str(reasons(run))) if not skipped else reasons(run) == {}
