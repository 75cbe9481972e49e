"""verify: optimizers and step counters that contradict one another, and NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verify.verify_runs import checked, saved

from ckptool.commands import stats
from ckptool.engine.read.tiles import read_tiles


def optimizer(steps: dict[str, int], **without: str) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    kinds = ("step", "exp_avg", "exp_avg_sq")
    state = {
        name: {
            kind: torch.tensor(float(step)) if kind == "step" else torch.ones(3)
            for kind in kinds
            if without.get(name) != kind
        }
        for name, step in steps.items()
    }
    model = {name: torch.ones(3) for name in steps}
    return {"model": model, "optimizer": {"state": state}, "step": 7}


def test_equal_step_counters_are_nothing_to_report(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", state=optimizer({"a": 7, "b": 7, "c": 7}))
    assert not checked(folder).findings


def test_step_counters_of_two_saves(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", state=optimizer({"a": 7, "b": 7, "c": 3}))
    (found,) = checked(folder).findings
    assert found.code == "steps-differ"
    assert "3 for optimizer.state.c.step; 7 for optimizer.state.a.step and 1 more" in found.message


def test_step_counters_that_differ_between_ranks(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", model_rank0={"step": 7}, model_rank1={"step": 8})
    (found,) = checked(folder).findings
    assert (found.code, found.message) == ("steps-differ", "step: 7 on rank 0, 8 on rank 1")


def test_optimizer_state_that_lacks_a_part(tmp_path: Path) -> None:
    state = optimizer({"a": 7, "b": 7, "c": 7}, c="exp_avg_sq")
    (found,) = checked(saved(tmp_path / "c", state=state), quick=True).findings
    assert found.code == "optimizer-incomplete"
    assert "optimizer.state.c: without exp_avg_sq, which 2 other" in found.message


def test_optimizer_state_of_another_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = optimizer({"a": 7, "b": 7})
    state["optimizer"]["state"]["b"]["exp_avg"] = torch.ones(4)
    (found,) = checked(saved(tmp_path / "c", state=state), quick=True).findings
    assert found.code == "optimizer-shape"
    assert "[4]" in found.message


def test_nan_is_a_warning_and_finite_makes_it_an_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.ones(1000, 3)
    values[7, 1], values[8, 2] = float("nan"), float("-inf")
    folder = saved(tmp_path / "c", state={"w": values, "columns": values.t(), "ok": torch.ones(3)})
    found = [f for f in checked(folder).findings if f.code == "not-finite"]
    assert {f.tensor for f in found} == {"w", "columns"}
    assert "1 NaN and 1 infinite values of 3,000" in found[0].message
    assert checked(folder).ok
    assert not checked(folder, fail_nonfinite=True).ok


def test_all_tensors_with_nan_are_counted_in_one_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    counted: list[int] = []

    def count(*arguments: Any) -> None:
        counted.append(1)
        read_tiles(*arguments)

    monkeypatch.setattr(stats, "read_tiles", count)
    state = {f"w{n}": torch.full((n + 1,), float("nan")) for n in range(5)}
    messages = [finding.message for finding in checked(saved(tmp_path / "c", state=state)).findings]
    assert messages == [f"w{n}: {n + 1} NaN and 0 infinite values of {n + 1}" for n in range(5)]
    assert len(counted) == 1
