"""prune: what stays since no step that stays has the like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from prune_runs import fates, names_in, pruned
from safetensors.torch import save_file
from trainer_runs import (
    BOTH,
    OPTIMIZER,
    TRAINERS,
    WEIGHT,
    age,
    of_dcp,
    run_of,
    weights,
    write_step,
)


def test_the_step_to_resume_from_is_read_however_quick(tmp_path: Path) -> None:
    """The last step is of the model alone, as torchtitan saves it; one before has NaN."""
    whole = of_dcp("model", "optimizer", "dataloader", "train_state")
    for step in (1, 2):
        whole(tmp_path / f"step-{step}")
    state = {"model": {"w": torch.full((4,), float("nan"))}, "train_state": {"step": 3},
             "optimizer": {"state": {"w": {"exp_avg": WEIGHT}}},
             "dataloader": {"dp_rank_0": {"seen": 3}}}  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    of_dcp("model")(tmp_path / "step-4")
    report = pruned(tmp_path, yes=True, quick=True)
    assert fates(report) == {
        "step-4": "keep", "step-3": "leave", "step-2": "keep", "step-1": "remove"
    }  # fmt: skip
    assert names_in(tmp_path) == ["step-2", "step-3", "step-4"]


def test_an_older_step_that_cannot_be_read_may_be_the_one_to_resume_from(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        torch.save({"model": {"w": WEIGHT}}, tmp_path / f"step-{step}.pt")
    (tmp_path / "step-1.pt").write_bytes(b"")
    (tmp_path / "step-2.pt").write_bytes(b"\x28\xb5\x2f\xfd" * 25)
    report = pruned(tmp_path, yes=True)
    assert names_in(tmp_path) == ["step-2.pt", "step-4.pt"]
    assert report.steps[2].reason.startswith("not good: ")
    for step in (1, 2, 3, 4):
        torch.save({"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}, tmp_path / f"step-{step}.pt")
    (tmp_path / "step-2.pt").write_bytes(b"\x28\xb5\x2f\xfd")
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path) == ["step-4.pt"]


def test_an_optimizer_that_is_an_object_may_be_the_one_to_resume_from(tmp_path: Path) -> None:
    """Its class is not loaded, so nothing of it is read."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(WEIGHT)])
    for step in (1, 2, 3, 4):
        more = {"optimizer": optimizer} if step < 4 else {}
        torch.save({"model": {"w": WEIGHT}} | more, tmp_path / f"step-{step}.pt")
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path) == ["step-3.pt", "step-4.pt"]
    (tmp_path / "step-4.pt").unlink()
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path) == ["step-3.pt"]


def test_a_file_with_nothing_in_it_keeps_no_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        torch.save({"model": {"w": WEIGHT}}, tmp_path / f"step-{step}" / "policy.pth")
        torch.save({}, tmp_path / f"step-{step}" / "extra_state.pth")
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path) == ["step-3"]


@pytest.mark.parametrize("name", ["tuned/model.safetensors", "ema/model.safetensors", "ema.pt"])
def test_a_model_inside_a_step_that_no_newer_one_has_stays(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"], (1, 2, 3, 4, 5))
    for step in (2, 3):
        inner = run / f"checkpoint-{step}" / name
        inner.parent.mkdir(exist_ok=True)
        weights(inner) if inner.suffix != ".pt" else torch.save({"w": WEIGHT}, inner)
        age(run / f"checkpoint-{step}", step)
    report = pruned(run, yes=True)
    assert names_in(run) == ["checkpoint-3", "checkpoint-5"]
    what = name.rpartition(".")[0]
    assert report.steps[2].reason == f"no newer good step has {what}"


@pytest.mark.parametrize("steps", [(100, 200), (50, 150)])
def test_what_only_some_steps_have_beside_them_stays(
    steps: tuple[int, ...], tmp_path: Path
) -> None:
    """Two trainings whose names differ in a word for a part of a step."""
    for step in (*steps, 300):
        for part in ("encoder", "decoder") if step in steps else ("decoder",):
            write_step(tmp_path / part, TRAINERS["transformers"], step)
    for step in (75, 175, 250):
        write_step(tmp_path / "decoder", TRAINERS["transformers"], step)
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path / "encoder") == [f"checkpoint-{steps[-1]}"]
    assert {"checkpoint-300"} <= {*names_in(tmp_path / "decoder")}


@pytest.mark.parametrize("names", [("test1", "test2"), ("eval_12", "eval_13"), ("loss1", "loss2")])
def test_runs_whose_names_may_be_metrics_are_counted_apart(
    names: tuple[str, str], tmp_path: Path
) -> None:
    for at in (100, 200, 300):
        for name, step in zip(names, (at, at + 50), strict=True):
            torch.save(BOTH, tmp_path / f"{name}-step-{step}.pt")
    for step, loss in ((10, 0.5), (20, 0.25)):
        torch.save(BOTH, tmp_path / f"net-loss_{loss}-acc_{step}-step-{step}.pt")
    pruned(tmp_path, yes=True)
    kept = [f"{names[0]}-step-300.pt", f"{names[1]}-step-350.pt"]
    assert names_in(tmp_path) == sorted([*kept, "net-loss_0.25-acc_20-step-20.pt"])


def test_weight_deltas_stay_after_the_weights_that_they_change(tmp_path: Path) -> None:
    said = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
    for step in (1, 4):
        write_step(tmp_path, TRAINERS["transformers"], step)
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").unlink()
    for step in (2, 3, 5, 6):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        save_file(
            {"w": torch.zeros(8, dtype=torch.uint8)}, folder / "model.safetensors", {"w": "0"}
        )
        index = {"metadata": {"version": f"{step}", "base_version": f"{step - 1}"} | said}
        text = json.dumps(index | {"weight_map": {"w": "model.safetensors"}})
        (folder / "model.safetensors.index.json").write_text(text)
    report = pruned(tmp_path, yes=True)
    assert report.steps[0].reason.startswith("a weight delta, ")
    assert names_in(tmp_path) == [f"checkpoint-{step}" for step in (2, 3, 4, 5, 6)]
