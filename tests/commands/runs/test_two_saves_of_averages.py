"""Steps with averages, teachers or stacked state, some of them of an earlier step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from test_two_saves import reasons, states, train

from ckptool.core.state_category import without_averages


def test_weights_of_an_earlier_step_beside_a_teacher_in_the_model(tmp_path: Path) -> None:
    """As of DINOv2."""
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        teacher = {name: weight + step for name, weight in weights.items()}
        model = {f"student.{n}": w for n, w in weights.items()}
        model |= {f"teacher.{n}": w for n, w in teacher.items()}
        (run := tmp_path / "run").mkdir(exist_ok=True)
        torch.save({"model": model, "optimizer": optimizer}, run / f"step_{step}.pt")
    assert reasons(run) == {}
    older = torch.load(run / "step_6.pt")["model"]
    model |= {name: weight for name, weight in older.items() if name.startswith("student")}
    torch.save({"model": model, "optimizer": optimizer}, run / "step_8.pt")
    assert "its weights are those of step_6.pt" in reasons(run)["step_8.pt"]


@pytest.mark.parametrize("which", ["model", "opt"])
def test_an_average_in_a_file_of_its_own(which: str, tmp_path: Path) -> None:
    """As of guided-diffusion."""
    (run := tmp_path / "run").mkdir()
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        average = {name: weight + step for name, weight in weights.items()}
        for name, state in (("model", weights), ("ema_0.999_", average), ("opt", optimizer)):
            torch.save(state, run / f"{name}{step:06}.pt")
    assert reasons(run) == {}
    shutil.copy(run / f"{which}000006.pt", run / f"{which}000008.pt")
    (why,) = reasons(run).values()
    assert "they are of two saves" in why


def test_a_weight_that_only_the_average_has(tmp_path: Path) -> None:
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        many = {f"{n}.{name}": weight for n in "ab" for name, weight in weights.items()}
        for name, state in (("model", many), ("ema_0.999_", many.copy()), ("opt", optimizer)):
            if (step, name) == (8, "model"):
                del state["a.l.1.weight"]
            torch.save(state, tmp_path / f"{name}{step:06}.pt")
    why = "like-missing: a.l.1.weight: missing, model000002.pt has it"
    assert reasons(tmp_path)["model000008.pt"].startswith(why)


def test_state_of_which_some_is_stacked(tmp_path: Path) -> None:
    """As of nanochat's Muon, and of icefall's ScaledAdam."""
    (run := tmp_path / "run").mkdir()
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        means = torch.stack([optimizer["state"][n]["exp_avg"] for n in range(3)])
        state = {0: {"momentum_buffer": means, "param_rms": torch.rand(3, 1, 1)}}
        torch.save({"model": weights, "optimizer": {"state": state}}, run / f"step_{step}.pt")
    assert reasons(run) == {}
    older, newest = torch.load(run / "step_6.pt"), torch.load(run / "step_8.pt")
    torch.save(newest | {"optimizer": older["optimizer"]}, run / "step_8.pt")
    assert "its optimizer is that of step_6.pt" in reasons(run)["step_8.pt"]


def test_what_is_no_average_though_its_name_begins_so() -> None:
    names = ["model.swa_blocks.0.weight", "model.teacher_forcing.weight", "model.ema.weight"]
    assert [*without_averages(dict.fromkeys(names))] == names[:2]


@pytest.mark.parametrize("name", ["ema_state_dict", "teacher"])
def test_weights_of_an_earlier_step_beside_an_average(name: str, tmp_path: Path) -> None:
    for step, (weights, optimizer) in states(tmp_path / "source").items():
        average = {f"module.{key}": weight + step for key, weight in weights.items()}
        state = {"state_dict": weights, name: average, "optimizer": optimizer}
        (run := tmp_path / "run").mkdir(exist_ok=True)
        torch.save(state, run / f"epoch_{step}.pth")
    assert reasons(run) == {}
    older = torch.load(run / "epoch_6.pth")
    torch.save(state | {"state_dict": older["state_dict"]}, run / "epoch_8.pth")
    assert "its weights are those of epoch_6.pth" in reasons(run)["epoch_8.pth"]
    torch.save(state | {name: older[name]}, run / "epoch_8.pth")
    assert reasons(run) == {}  # it may begin later


def test_an_average_begins_later(tmp_path: Path) -> None:
    run = train(tmp_path)
    for step in (2, 4, 6, 8):
        folder = run / f"checkpoint-{step}"
        average = run / f"ema-{step}"
        shutil.copytree(folder, average)
        shutil.copy(run / "checkpoint-2/model.safetensors", average)
    assert reasons(run) == {}
