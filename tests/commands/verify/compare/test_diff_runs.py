"""``ckptool diff RUN1 RUN2``: the newest step that both have, arguments and configs first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Ended, run_command

import ckptool
from ckptool.errors import UsageError


def run_of(folder: Path, *steps: int, lr: float, name: str = "step-{}") -> Path:
    for step in steps:
        torch.manual_seed(step)
        state = {
            "model": {"w": torch.randn(4)},
            "args": {"lr": lr, "betas": [0.9, 0.95 if lr > 1e-4 else 0.98]},
            "step": step,
        }
        dcp.save(state, checkpoint_id=folder / name.format(step), no_dist=True)
    (folder / "config.json").write_text(json.dumps({"lr": lr, "model": {"layers": 2}}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    one = run_of(tmp_path / "a", 100, 200, 300, lr=3e-4)
    return one, run_of(tmp_path / "b", 100, 200, 250, lr=1e-4)


def diff(*words: object) -> Ended:
    return run_command("diff", *words)


def test_the_newest_step_that_both_have_is_compared(runs: tuple[Path, Path]) -> None:
    done = diff(*runs)
    assert done.code == 1
    first, second, third, *rest = done.stdout.splitlines()
    assert f"{runs[0]}/step-200" in first
    assert f"{runs[1]}/step-200" in second
    assert third.strip() == "the newest step that both runs have"
    assert rest[1].startswith("error value-differs")
    assert rest[2:4] == [
        "  args.lr: A 0.0003, B 0.0001",
        "  args.betas: [1] A 0.95, B 0.98",
    ] or rest[2:4] == [
        "  args.betas: [1] A 0.95, B 0.98",
        "  args.lr: A 0.0003, B 0.0001",
    ]
    assert "  config.json: ['lr'] A 0.0003, B 0.0001" in rest
    assert rest[-2] == "DIFFERENT: 2 other differences"


def test_a_step_that_is_not_complete_in_both_is_not_compared(runs: tuple[Path, Path]) -> None:
    (runs[1] / "step-200" / ".metadata").unlink()
    report = ckptool.diff(*runs)
    assert report.of_runs
    assert (report.a.path, report.b.path) == tuple(run / "step-100" for run in runs)


def test_steps_of_other_names_are_matched_by_their_numbers(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a", 100, 200, lr=1e-3)
    other = run_of(tmp_path / "b", 50, 100, lr=1e-3, name="checkpoint-{}")
    report = ckptool.diff(one, other)
    assert (report.a.path.name, report.b.path.name) == ("step-100", "checkpoint-100")
    assert report.ok
    assert ckptool.diff(one, other, values=True).ok


def test_runs_without_a_common_step_are_said(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a", 100, 200, lr=1e-3)
    other = run_of(tmp_path / "b", 50, 150, lr=1e-3)
    with pytest.raises(UsageError, match="no complete step in common"):
        ckptool.diff(one, other)


def test_a_run_and_a_checkpoint_are_not_guessed_at(runs: tuple[Path, Path]) -> None:
    done = diff(runs[0], runs[1] / "step-100")
    assert done.code == 3
    assert "contains 3 checkpoints" in done.stderr
