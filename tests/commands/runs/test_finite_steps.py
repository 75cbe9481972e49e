"""The last finite step is never passed over for, nor removed because of, one that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from prune_runs import fates, names_in, pruned
from safetensors.torch import save_file
from trainer_runs import WEIGHT

import ckptool

NAN, INF = float("nan"), float("inf")
State = dict[str, Any]


def state() -> State:
    moments = {"exp_avg": WEIGHT * 0.1, "exp_avg_sq": WEIGHT**2, "step": torch.tensor(5.0)}
    moments["master_param"] = WEIGHT.clone()
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    model = {"layers.0.w": WEIGHT.clone(), "scale": torch.tensor(1.0)}
    return {"model": model, "optimizer": optimizer, "step": 5}


def of_code(dtype: torch.dtype, code: int) -> Callable[[State], object]:
    """Put a code into a weight of 8 bits."""

    def spoil(state: State) -> None:
        codes = torch.zeros(6, 8, dtype=torch.uint8)
        codes[3, 3] = code
        state["model"]["layers.0.w"] = codes.view(dtype)

    return spoil


def in_model(value: float, dtype: torch.dtype = torch.float32) -> Callable[[State], object]:
    def spoil(state: State) -> None:
        weight = torch.randn(9, 12).to(dtype)
        weight[-1, -2] = value
        state["model"]["layers.0.w"] = weight[1:, ::2].t()  # a view, column by column

    return spoil


def in_moment(kind: str, value: float) -> Callable[[State], object]:
    return lambda state: state["optimizer"]["state"][0][kind].view(-1)[-1:].fill_(value)


def in_squares(state: State) -> None:
    squares = state["optimizer"]["state"][0]["exp_avg_sq"].view(-1)
    squares[0], squares[-1] = INF, -INF


SPOILED: dict[str, Callable[[State], object]] = {
    "the last value": in_model(NAN),
    "minus infinity": in_model(-INF),
    "bf16": in_model(NAN, torch.bfloat16),
    "complex": in_model(complex(0, NAN), torch.complex64),  # type: ignore[arg-type]
    "e4m3": of_code(torch.float8_e4m3fn, 0xFF),
    "e5m2": of_code(torch.float8_e5m2, 0x7C),
    "e4m3fnuz": of_code(torch.float8_e4m3fnuz, 0x80),
    "e8m0": of_code(torch.float8_e8m0fnu, 0xFF),
    "a scalar": lambda state: state["model"]["scale"].fill_(NAN),
    "an average of weights": lambda state: state.update(ema={"w": WEIGHT * NAN}),
    "a mean": in_moment("exp_avg", NAN),
    "a mean of squares": in_moment("exp_avg_sq", NAN),
    "an infinite mean": in_moment("exp_avg", INF),
    "a mean of squares below zero": in_moment("exp_avg_sq", -INF),
    "the second infinite mean of squares": in_squares,
    "infinite masters": in_moment("master_param", INF),
    "a learning rate": lambda state: state["optimizer"]["param_groups"][0].update(lr=NAN),
    "masters": lambda state: state["optimizer"].update(fp32_from_fp16=[WEIGHT * NAN]),
}
WRITERS: dict[str, Callable[[State, Path], object]] = {
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    "torch": lambda state, path: torch.save(state, path / "m.pt"),
}


def run_with(spoil: Callable[[State], object], write: Callable[[State, Path], object], run: Path):
    for step in (1, 2, 3, 4):
        made = state()
        if step > 2:
            spoil(made)
        (run / f"step-{step}").mkdir(parents=True)
        write(made, run / f"step-{step}")


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("where", SPOILED)
def test_the_newest_finite_step_is_the_good_one(where: str, how: str, tmp_path: Path) -> None:
    run_with(SPOILED[where], WRITERS[how], tmp_path)
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "step-2"
    assert [step.path.name for step in report.steps] == ["step-4", "step-3", "step-2"]
    for passed in report.steps[:2]:
        assert "not-finite: " in passed.reasons[0]
        assert passed.reasons[0].endswith("(--allow-nonfinite counts it as good)")
    assert fates(pruned(tmp_path))["step-2"] == "keep"
    assert fates(pruned(tmp_path, allow_nonfinite=True))["step-2"] == "remove"


@pytest.mark.parametrize("quick", [False, True])
def test_no_finite_step_is_removed_for_one_that_is_not(quick: bool, tmp_path: Path) -> None:
    run_with(SPOILED["a mean"], WRITERS["torch"], tmp_path)
    report = pruned(tmp_path, yes=True, quick=quick)
    assert {step.path.name: step.ok for step in report.steps[:3]} == {
        "step-4": False,
        "step-3": False,
        "step-2": True,
    }
    assert names_in(tmp_path) == ["step-2", "step-3", "step-4"]
    pruned(tmp_path, yes=True, quick=quick)  # nothing changes the second time
    assert names_in(tmp_path) == ["step-2", "step-3", "step-4"]


def save_step_of_trainer(run: Path, step: int, model: State, optimizer: State) -> Path:
    """Save a step as transformers' Trainer does: model, optimizer, and the record of the step."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    save_file(model, folder / "model.safetensors")
    torch.save(optimizer, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


@pytest.mark.parametrize(
    ("kind", "value", "newest"),
    [
        ("exp_avg_sq", NAN, 1),
        ("exp_avg_sq", INF, 2),  # a step divides by it
        ("exp_avg_sq", 1.0, 2),
        ("exp_avg", INF, 1),
    ],
)
def test_the_optimizer_beside_a_model_is_read_too(
    kind: str, value: float, newest: int, tmp_path: Path
) -> None:
    for step in (1, 2):
        made = state()
        if step == 2:
            in_moment(kind, value)(made)
        save_step_of_trainer(tmp_path, step, made["model"], made["optimizer"])
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == f"checkpoint-{newest}"
    if newest == 1:
        (reason,) = report.steps[0].reasons
        assert reason.startswith(f"not-finite: optimizer.pt: state.0.{kind}: ")
        assert reason.endswith("(--allow-nonfinite counts it as good)")
    assert ckptool.verify_run(tmp_path, allow_nonfinite=True).steps[0].ok


@pytest.mark.parametrize(
    ("taken", "rate", "newest"), [(20, 0.5, 20), (10, 0.5, 20), (30, 0.5, 20), (30, 0.4, 10)]
)
def test_the_optimizer_beside_a_model_is_of_the_same_save(
    taken: int, rate: float, newest: int, tmp_path: Path
) -> None:
    """It may have been begun again, or have taken steps before, at the rate of its schedule."""
    for step in (10, 20):
        made = {0: {"step": torch.tensor(float(taken if step == 20 else step)), "exp_avg": WEIGHT}}
        optimizer = {"state": made, "param_groups": [{"lr": rate}]}
        folder = save_step_of_trainer(tmp_path, step, {"w": WEIGHT}, optimizer)
        torch.save({"last_epoch": step, "_last_lr": [0.5]}, folder / "scheduler.pt")
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == f"checkpoint-{newest}"
    if newest == 10:
        (reason,) = report.steps[0].reasons
        assert reason.startswith("counts-differ: optimizer.pt: the optimizer has taken 30 steps, ")


def test_a_reason_quotes_the_tensor_that_decides(tmp_path: Path) -> None:
    def spoil(state: State) -> None:
        moments = state["optimizer"]["state"]
        moments[1] = {"exp_avg": WEIGHT * NAN, "exp_avg_sq": WEIGHT**2}
        in_moment("exp_avg_sq", INF)(state)

    run_with(spoil, WRITERS["torch"], tmp_path)
    (reason,) = ckptool.verify_run(tmp_path).steps[0].reasons
    assert reason.startswith("m.pt: not-finite: optimizer.state.1.exp_avg: 4 NaN ")
    assert "; 2 tensors affected: optimizer.state.0.exp_avg_sq, " in reason
