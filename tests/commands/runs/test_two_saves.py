"""Steps that have weights, an optimizer or a scheduler of an earlier step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prune_runs import fates, pruned
from safetensors.torch import load_file, save_file
from torch.optim import lr_scheduler as schedules

import ckptool


def train(
    run: Path,
    *,
    frozen: bool = False,
    learns: bool = True,
    rate: float | torch.Tensor = 1e-3,
    decays: bool = False,
    made: Any = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    file: str = "optimizer.bin",
    **options: Any,
) -> Path:
    """Train for eight steps, and save every other one as accelerate or transformers do.

    If it is ``frozen``, an adapter is trained that is not saved; no ``learns``, no step is taken.
    """
    torch.manual_seed(0)
    weights = {f"l.{n}.weight": torch.nn.Parameter(torch.randn(16, 8).to(dtype)) for n in range(3)}
    trained = [torch.nn.Parameter(torch.randn(2, 8))] if frozen else [*weights.values()]
    optimizer = made(trained, lr=rate, **options)
    scheduler = schedules.LambdaLR(optimizer, lambda at: max(0.0, 1 - at / 3) if decays else 1.0)
    for step in range(1, 9):
        for weight in trained:
            weight.grad = torch.randn_like(weight) * 1e-3
        if learns:
            optimizer.step()
        scheduler.step()
        if step % 2 == 0:
            (folder := run / f"checkpoint-{step}").mkdir(parents=True)
            tensors = {name: weight.detach() for name, weight in weights.items()}
            save_file(tensors, folder / "model.safetensors")
            torch.save(optimizer.state_dict(), folder / file)
            if file.endswith("bin"):
                torch.save(scheduler.state_dict(), folder / "scheduler.bin")
                torch.save({"step": 0}, folder / "random_states_0.pkl")
    return run


def states(run: Path) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """What a run has of its model and its optimizer at each step."""
    train(run)
    return {
        step: (
            load_file(run / f"checkpoint-{step}/model.safetensors"),
            torch.load(run / f"checkpoint-{step}/optimizer.bin"),
        )
        for step in (2, 4, 6, 8)
    }


def reasons(run: Path, **options: Any) -> dict[str, str]:
    steps = ckptool.verify_run(run, every=True, **options).steps
    return {step.path.name: reason for step in steps for reason in step.reasons}


@pytest.mark.parametrize("file", ["optimizer.bin", "optimizer.pt"])
@pytest.mark.parametrize("old", [2, 6])
def test_files_of_an_earlier_step(file: str, old: int, tmp_path: Path) -> None:
    run = train(tmp_path, file=file)
    assert reasons(run) == {}
    shutil.copy(run / f"checkpoint-{old}" / file, run / "checkpoint-8")
    why = f"counts-differ: its optimizer is that of checkpoint-{old}, but not its weights: they are"
    assert reasons(run)["checkpoint-8"].startswith(why)
    assert reasons(run, ignore=("counts-differ",)) == {}
    shutil.copy(run / f"checkpoint-{old}/model.safetensors", run / "checkpoint-8")
    assert reasons(run) == {}  # nothing was trained in between
    shutil.copy2(run / "checkpoint-4/model.safetensors", run / "checkpoint-6")
    why = "counts-differ: its weights are those of checkpoint-4, but not its optimizer"
    assert reasons(run)["checkpoint-6"].startswith(why)
    assert fates(pruned(run, keep_last=2))["checkpoint-6"] == "leave"


@pytest.mark.parametrize(
    ("rate", "dtype", "moves"),
    [
        (1e-3, torch.float32, True),
        (1e-5, torch.float32, False),  # 1e-8 at most, of weights near 1
        (1e-3, torch.bfloat16, False),
    ],
)
def test_weights_of_an_earlier_step_beside_momentum(
    rate: float, dtype: torch.dtype, moves: bool, tmp_path: Path
) -> None:
    run = train(tmp_path, made=torch.optim.SGD, momentum=0.9, rate=rate, dtype=dtype)
    assert reasons(run) == {}
    shutil.copy(run / "checkpoint-6/model.safetensors", run / "checkpoint-8")
    assert [*reasons(run)] == ["checkpoint-8"] * moves


@pytest.mark.parametrize("rate", [torch.tensor(1e-3), np.float64(1e-3), np.float32(1e-3)])
def test_weights_of_an_earlier_step_beside_a_rate_of_another_type(
    rate: Any, tmp_path: Path
) -> None:
    run = train(tmp_path, rate=rate)
    assert reasons(run) == {}
    shutil.copy(run / "checkpoint-6/model.safetensors", run / "checkpoint-8")
    assert [*reasons(run)] == ["checkpoint-8"]


def test_weights_of_an_earlier_step_beside_state_of_bitsandbytes(tmp_path: Path) -> None:
    run = train(tmp_path)
    for path in run.glob("*/optimizer.bin"):
        optimizer = torch.load(path)
        for state in optimizer["state"].values():
            mean, square = state.pop("exp_avg"), state.pop("exp_avg_sq")
            state["__bnb_optimizer_quant_state__"] = {
                "state1": (mean * 1e4 + 128).byte(),
                "state2": (square * 1e7).byte(),
            }
        torch.save(optimizer, path)
    assert reasons(run) == {}
    shutil.copy(run / "checkpoint-6/model.safetensors", run / "checkpoint-8")
    assert [*reasons(run)] == ["checkpoint-8"]


def test_moments_in_rows_beside_masks_that_stay(tmp_path: Path) -> None:
    """As of SPAM, which keeps the moments of what a mask selects."""
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        for state in optimizer["state"].values():
            state["mask"] = torch.ones(16, 8, dtype=torch.bool)
            state |= {name: state[name].flatten() for name in ("exp_avg", "exp_avg_sq")}
        (run := tmp_path / "run").mkdir(exist_ok=True)
        torch.save({"model": weights, "optimizer": optimizer}, run / f"step_{step}.pt")
    assert reasons(run) == {}
    older, newest = torch.load(run / "step_6.pt"), torch.load(run / "step_8.pt")
    torch.save(newest | {"optimizer": older["optimizer"]}, run / "step_8.pt")
    assert "its optimizer is that of step_6.pt" in reasons(run)["step_8.pt"]


@pytest.mark.parametrize("where", ["run/checkpoint-{}/{}.pt", "run/{1}_step{0}.pt"])
@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_a_model_and_its_optimizer_in_files_of_their_own(
    where: str, which: str, tmp_path: Path
) -> None:
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        for name, state in (("model", weights), ("optimizer", optimizer)):
            path = tmp_path / where.format(step, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
    assert reasons(tmp_path / "run") == {}
    shutil.copy(tmp_path / where.format(6, which), tmp_path / where.format(8, which))
    (why,) = reasons(tmp_path / "run").values()
    assert "they are of two saves" in why


def test_the_last_needs_no_file_that_steps_have(tmp_path: Path) -> None:
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        (folder := tmp_path / "run" / ("last" if step == 8 else f"step_{step}")).mkdir(parents=True)
        torch.save(weights, folder / "model.pt")
        torch.save(optimizer, folder / "optimizer.pt")
        if step != 8:
            torch.save({"last_epoch": step}, folder / "scheduler.pt")
    (tmp_path / "run/latest").write_text("last")
    assert reasons(tmp_path / "run") == {}


@pytest.mark.parametrize("run", ["run", "with_ema"])
def test_files_of_their_own_in_a_run_of_any_name(run: str, tmp_path: Path) -> None:
    (folder := tmp_path / run).mkdir()
    for step, (model, optimizer) in states(tmp_path / "trained").items():
        torch.save({"model": model, "optimizer": optimizer}, folder / f"ckpt_{step}.pt")
    assert reasons(folder) == {}
    newest, older = (torch.load(folder / f"ckpt_{step}.pt") for step in (8, 6))
    torch.save({**newest, "optimizer": older["optimizer"]}, folder / "ckpt_8.pt")
    assert [*reasons(folder)] == ["ckpt_8.pt"]


@pytest.mark.parametrize("name", ["last", "best_model", "model_final"])
def test_the_last_is_compared_with_those_beside_it_that_count(name: str, tmp_path: Path) -> None:
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        state = {"model": weights, "optimizer": optimizer, "epoch": step}
        (run := tmp_path / "run").mkdir(exist_ok=True)
        torch.save(state, run / (f"{name}.pt" if step == 8 else f"checkpoint_{step}.pt"))
    assert reasons(run) == {}
    older = torch.load(run / "checkpoint_6.pt")
    torch.save(state | {"optimizer": older["optimizer"]}, run / f"{name}.pt")
    assert "its optimizer is that of checkpoint_6.pt" in reasons(run)[f"{name}.pt"]
    emptied = {"state": {}, "param_groups": optimizer["param_groups"]}
    torch.save(state | {"optimizer": emptied}, run / f"{name}.pt")
    assert "no optimizer's state, which checkpoint_6.pt has" in reasons(run)[f"{name}.pt"]
    for alone in (weights, {"model": weights, "optimizer": None}, older):
        torch.save(alone, run / f"{name}.pt")
        assert reasons(run) == {}


def apart(run: Path, model: str, optimizer: str) -> list[Path]:
    """Save the model and the optimizer of each step of a run in files below it."""
    steps = sorted(run.iterdir())
    for step in steps:
        state = load_file(step / "model.safetensors")
        for name, value in ((model, state), (optimizer, torch.load(step / "optimizer.bin"))):
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, step / name)
        for file in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
            (step / file).unlink()
    return steps


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("model/pp_00/tp_00/sdp_00.pt", "optimizer/pp_00/tp_00/sdp_00.pt"),
        ("weights.pt", "optim.pt"),
    ],
)
def test_files_of_an_earlier_step_in_parts_of_one(
    model: str, optimizer: str, tmp_path: Path
) -> None:
    *_, before, last = apart(train(tmp_path), model, optimizer)
    assert reasons(tmp_path) == {}
    shutil.copy(before / optimizer, last / optimizer)
    assert "its optimizer is that of checkpoint-6, but not its" in reasons(tmp_path)[last.name]


def test_a_model_that_stands_still_beside_one_that_is_trained(tmp_path: Path) -> None:
    first, *others = apart(train(tmp_path), "policy.pt", "optimizer.pt")
    shutil.copy(first / "policy.pt", first / "reference.pt")
    for step in others:
        shutil.copy(first / "reference.pt", step)
    assert reasons(tmp_path) == {}


def test_weights_of_16_bits_of_an_earlier_step(tmp_path: Path) -> None:
    run = train(tmp_path, dtype=torch.bfloat16)
    assert reasons(run) == {}
    shutil.copy(run / "checkpoint-6/model.safetensors", run / "checkpoint-8")
    assert "its weights are those of checkpoint-6" in reasons(run)["checkpoint-8"]


@pytest.mark.parametrize("name", ["embed.weight", "embed.lora_B.weight"])
def test_a_matrix_of_zeros_that_was_none(name: str, tmp_path: Path) -> None:
    run = train(tmp_path)
    for path in run.glob("*/model.safetensors"):
        tensors = load_file(path)
        weight = tensors.pop("l.1.weight")
        tensors[name] = weight * 0 if "-8" in str(path.parent.name) else weight
        save_file(tensors | {"begun.weight": torch.zeros(16, 8)}, path)
    why = f"weight-zero: model.{name}: all values are zero, which they are not in checkpoint-6"
    why += " (--ignore weight-zero counts it as good)"
    assert reasons(run) == ({} if "lora" in name else {"checkpoint-8": why})
    assert reasons(run, ignore=("weight-zero",)) == {}


def test_numbers_that_are_packed_are_not_compared(tmp_path: Path) -> None:
    run = train(tmp_path)
    bits = torch.ones(16, 8, dtype=torch.uint8).view(torch.bits8)
    packed = {f"l.{n}.weight": bits for n in range(3)}
    for folder in run.iterdir():
        (folder / "model.safetensors").unlink()
        torch.save(packed, folder / "pytorch_model.bin")
    assert reasons(run) == {}


def test_a_scheduler_that_has_not_stepped(tmp_path: Path) -> None:
    run = train(tmp_path)
    path = run / "checkpoint-8/scheduler.bin"
    torch.save(torch.load(path) | {"last_epoch": 0, "_step_count": 1}, path)
    assert reasons(run) == {
        "checkpoint-8": "counts-differ: scheduler.last_epoch is 0, but 6 in checkpoint-6, after"
        " which the optimizer has taken more steps: the learning rate would begin again (--ignore"
        " counts-differ counts it as good)"
    }
    for step in (2, 4, 6):  # it counts epochs
        path = run / f"checkpoint-{step}/scheduler.bin"
        torch.save(torch.load(path) | {"last_epoch": step // 2}, path)
    assert reasons(run) == {}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"frozen": True}, id="an adapter is trained"),
        pytest.param({"rate": 0.0}, id="a rate of zero"),
        pytest.param({"rate": 1e-9}, id="a rate too small to be seen"),
        pytest.param({"rate": 1e-6, "dtype": torch.bfloat16}, id="a rate too small for bf16"),
        pytest.param({"decays": True}, id="a rate that ends at zero"),
        pytest.param({"learns": False}, id="no step"),
        pytest.param({"made": torch.optim.SGD}, id="no state"),
        pytest.param(
            {"made": torch.optim.SGD, "momentum": 0.9, "rate": 1e-6}, id="SGD of a small rate"
        ),
        pytest.param({"made": torch.optim.Adafactor, "rate": 1e-2}, id="Adafactor"),
    ],
)
def test_what_stands_still(how: dict[str, Any], tmp_path: Path) -> None:
    assert reasons(train(tmp_path, **how)) == {}


def save_optimizers(run: Path, step: int, **optimizers: Any) -> Path:
    (folder := run / f"step_{step}").mkdir(parents=True, exist_ok=True)
    torch.manual_seed(step)
    model = {f"l.{n}.weight": torch.randn(16, 8) for n in range(3)}
    torch.save({"model": model, **optimizers}, folder / "state.pt")
    return run


def optimizer(
    taken: int, *, lacks: set[int], count: Callable[[float], Any] = torch.tensor, **options: Any
) -> dict[str, Any]:
    state = {n: {"step": count(float(taken)), "exp_avg": torch.randn(16, 8)} for n in range(3)}
    groups = [{"lr": 1e-3, "params": [0, 1]}, {"lr": 1e-3, "params": [2]}]
    return {
        "state": {n: each for n, each in state.items() if n not in lacks},
        "param_groups": [group | {"betas": (0.9, 0.99)} | options for group in groups],
    }


@pytest.mark.parametrize("count", [torch.tensor, int])
def test_state_of_a_parameter_that_an_earlier_step_has(
    count: Callable[[float], Any], tmp_path: Path
) -> None:
    for step in (10, 20):
        save_optimizers(tmp_path, step, optimizer=optimizer(step, lacks={0}, count=count))
    assert reasons(tmp_path) == {}  # an expert that was never chosen
    save_optimizers(tmp_path, 30, optimizer=optimizer(30, lacks={0, 1}, count=count))
    assert reasons(tmp_path) == {
        "step_30": "optimizer-incomplete: optimizer.state.1: without optimizer state, which step_20"
        " has (--ignore optimizer-incomplete counts it as good)"
    }
    assert reasons(tmp_path, ignore=("optimizer-incomplete",)) == {}
    save_optimizers(tmp_path, 30, optimizer=optimizer(10, lacks={0, 1}))  # begun again
    assert reasons(tmp_path) == {}


@pytest.mark.parametrize("which", ["optim_g", "optim_d"])
def test_one_of_two_optimizers_is_emptied(which: str, tmp_path: Path) -> None:
    def both(taken: int, **lacks: set[int]) -> dict[str, Any]:
        names = ("optim_g", "optim_d")
        return {name: optimizer(taken, lacks=lacks.get(name, set())) for name in names}

    for step in (10, 20):
        save_optimizers(tmp_path, step, **both(step))
    assert reasons(tmp_path) == {}
    save_optimizers(tmp_path, 30, **both(30, **{which: {0, 1, 2}}))
    assert reasons(tmp_path)["step_30"].startswith(f"optimizer-incomplete: {which}.state.0, ")
    save_optimizers(tmp_path, 30, **both(10, **{which: {0, 1, 2}}))  # both were begun again
    assert reasons(tmp_path) == {}


@pytest.mark.parametrize("file", ["optimizer.bin", "optimizer.pt"])
def test_the_optimizer_of_a_later_step(file: str, tmp_path: Path) -> None:
    """The later step has both of its own, as the steps show that the optimizer has taken."""
    run = train(tmp_path, file=file)
    shutil.copy(run / "checkpoint-8" / file, run / "checkpoint-6")
    message = "counts-differ: its optimizer is that of checkpoint-8, which is newer, but not its"
    found = reasons(run)
    assert [*found] == ["checkpoint-6"]
    assert found["checkpoint-6"].startswith(f"{message} weights: they are of two saves")
    assert fates(pruned(run, keep_last=1))["checkpoint-8"] == "keep"
