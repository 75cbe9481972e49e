"""Steps of DeepSpeed's ZeRO 3, whose trained weights are masters alone, beside frozen ones."""

from __future__ import annotations

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
    }
    torch.save(model, folder / MODEL)


def change(run: Path, **changes: Any) -> None:
    """Give the optimizer of the last step another part, as by the name of this."""
    file = run / "global_step40" / OPTIMIZER
    content = torch.load(file)
    content["optimizer_state_dict"] |= changes
    torch.save(content, file)


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
