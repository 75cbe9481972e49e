"""What lies beside steps: it is none if it lies there once, unless it should have a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from prune_runs import fates, pruned
from safetensors.torch import save_file
from trainer_runs import OPTIMIZER, WEIGHT, checked

import ckptool


def test_what_a_trainer_keeps_once_beside_its_steps_is_no_step(tmp_path: Path) -> None:
    """torchtune 0.6, _checkpointer.py: recipe_state has the optimizer of the latest epoch."""
    for epoch in (0, 1):
        (folder := tmp_path / f"epoch_{epoch}").mkdir()
        save_file({"w": WEIGHT}, folder / "model.safetensors", {"format": "pt"})
    (folder := tmp_path / "recipe_state").mkdir()
    torch.save({"optimizer": OPTIMIZER, "epochs_run": 2}, folder / "recipe_state.pt")
    report = checked(tmp_path)
    assert report.ok
    assert report.latest_good is not None
    assert report.latest_good.path == tmp_path / "epoch_1"
    state, whole = folder / "recipe_state.pt", (folder / "recipe_state.pt").read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    newest = ckptool.verify_run(tmp_path, every=False)
    assert newest.latest_good is not None
    assert newest.latest_good.path == tmp_path / "epoch_1"
    assert newest.chosen.endswith("a model alone: nothing that training goes on from is good")
    assert newest.steps[-1].path == state
    assert "truncated" in newest.steps[-1].reasons[0]
    state.write_bytes(whole)
    folder.rename(tmp_path / "epoch_2")
    assert not checked(tmp_path).ok
    (tmp_path / "epoch_2").rename(tmp_path / "last")
    assert not checked(tmp_path).ok


def test_state_without_a_model_is_no_fault_only_beside_the_steps(tmp_path: Path) -> None:
    for step in (10, 20):
        (folder := tmp_path / f"step_{step}").mkdir()
        torch.save({"w": WEIGHT}, folder / "model.pt")
    torch.save(OPTIMIZER, tmp_path / "optimizer.pt")
    report = checked(tmp_path)
    assert report.ok
    assert report.latest_good is not None
    assert report.latest_good.number == 20
    for name in ("args.pt", "recipe_state.pt", "cosine_optimizer.pt", "y.pt"):
        torch.save({"lr": 0.1} if name == "args.pt" else OPTIMIZER, tmp_path / name)
        report = checked(tmp_path)
        assert (report.ok, report.latest_good and report.latest_good.number) == (True, 20)
        (tmp_path / name).unlink()
    lost = "consolidated/optim.pt", "averaged/x.pt", "best_optimizer.pt", "ema.pt", "model.pt"
    for name in lost:
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save(OPTIMIZER, path)
        assert "has no tensors of a model, which other steps have" in {
            why for step in checked(tmp_path).steps for why in step.reasons
        }
        path.unlink()


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_saved_of_the_data_with_each_step_is_no_step_without_a_model(
    first: int, tmp_path: Path
) -> None:
    """slime, rollout/data_source.py, and its steps of FSDP, which are counted from 1.

    A series that has a model must have it in each.
    """
    (data := tmp_path / "rollout").mkdir()
    for step in (19, 39):
        (folder := tmp_path / f"iter_{step + first:07d}").mkdir()
        torch.save({"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}, folder / "state.pt")
        torch.save({"sample_offset": step}, data / f"global_dataset_state_dict_{step}.pt")
    report = checked(tmp_path)
    assert report.ok
    assert report.latest_good is not None
    assert report.latest_good.path.name == f"iter_{39 + first:07d}"
    torch.save({"w": WEIGHT}, data / "global_dataset_state_dict_19.pt")
    assert not checked(tmp_path).ok


def test_the_best_and_the_last_beside_an_optimizer_are_saves_apart(tmp_path: Path) -> None:
    for name in ("best.pt", "last.pt"):
        torch.save({"w": WEIGHT}, tmp_path / name)
    torch.save(OPTIMIZER, tmp_path / "optimizer.pt")
    assert len(checked(tmp_path).steps) == 3


@pytest.mark.parametrize("other", ["cosine-scheduler", "opt-125m"])
def test_models_called_after_what_is_beside_one_are_saves_apart(other: str, tmp_path: Path) -> None:
    for name in ("baseline", other):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"w": WEIGHT}, folder / "model.safetensors", {"format": "pt"})
    assert {step.path.name for step in checked(tmp_path).steps} == {"baseline", other}
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-2])
    assert {step.path.name: step.ok for step in checked(tmp_path).steps} == {
        "baseline": True, other: False
    }  # fmt: skip


def full(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}, path)


def alone(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": WEIGHT}, path)


@pytest.mark.parametrize(
    "model",
    ["epoch3.pt", "exported/policy.pt", "pretrained_model_1250000.pt", "global_step2-avg.pt"],
)
def test_a_model_is_no_step_where_training_goes_on_from_others(model: str, tmp_path: Path) -> None:
    """diffusion-pipe, rsl_rl, F5-TTS, icefall: also if the newest that goes on is damaged."""
    for step in (1, 2):
        full(tmp_path / f"global_step{step}.pt")
    alone(tmp_path / model)
    report = checked(tmp_path)
    assert report.ok
    assert report.latest_good is not None
    assert report.latest_good.path.name == "global_step2.pt"
    assert [step.path for step in report.steps if step.export] == [tmp_path / model]
    newest = tmp_path / "global_step2.pt"
    newest.write_bytes(newest.read_bytes()[:-300])
    report = checked(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "global_step1.pt"


def test_a_model_is_a_step_where_others_lie_apart_or_its_like_had_an_optimizer(
    tmp_path: Path,
) -> None:
    full(tmp_path / "one" / "step_1.pt")
    alone(tmp_path / "two" / "step_2.pt")
    report = checked(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.number == 2
    full(tmp_path / "one" / "last.pt")
    alone(tmp_path / "one" / "step_3.pt")
    assert [step.path.name for step in checked(tmp_path).steps if not step.ok] == ["step_3.pt"]


def test_a_model_is_no_step_above_the_folder_of_others(tmp_path: Path) -> None:
    """SchNetPack, and scripts that save the model at the end, beside Lightning's folder."""
    full(tmp_path / "checkpoints" / "last.ckpt")
    alone(tmp_path / "best_model")
    report = checked(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "last.ckpt"
    alone(tmp_path / "step_3.pt")
    assert [step.path.name for step in checked(tmp_path).steps if step.export] == ["best_model"]


def test_a_folder_of_a_model_with_an_optimizer_of_each_rank_is_gone_on_from(tmp_path: Path) -> None:
    """AReaL, which keeps the optimizer in its latest save alone."""
    names = [f"epoch0epochstep{step}globalstep{step}" for step in (1, 2)]
    for name in (*names, "recover_checkpoint"):
        (folder := tmp_path / name).mkdir()
        save_file({"w": WEIGHT}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text("{}")
    for rank in (0, 1):
        torch.save(OPTIMIZER, folder / f"optim_world_size_2_rank_{rank}.pt")
    report = checked(tmp_path)
    assert report.ok
    assert report.latest_good is not None
    assert report.latest_good.path == folder
    assert {step.path.name for step in report.steps if step.export} == {*names}


def test_a_copy_above_the_folder_of_what_it_is_a_copy_of(tmp_path: Path) -> None:
    """xtuner, which names its newest copy by a link."""
    for step in (1, 2):
        full(tmp_path / "checkpoints" / f"ckpt-step-{step}.pt")
        alone(tmp_path / f"hf-{step}.pt")
    (tmp_path / "hf-latest.pt").symlink_to("hf-2.pt")
    report = checked(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "ckpt-step-2.pt"
    assert {s.path.name for s in report.steps if s.export} == {
        "hf-1.pt", "hf-2.pt", "hf-latest.pt"
    }  # fmt: skip


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_model_alone_is_named_where_nothing_that_goes_on_is_good(
    value: float, tmp_path: Path
) -> None:
    """ESPnet: checkpoint.pth is all that training goes on from, and 2epoch.pth a model."""
    state = {"model": {"w": WEIGHT * value}, "optimizer": OPTIMIZER}
    for epoch in (1, 2):
        alone(tmp_path / f"{epoch}epoch.pth")
    torch.save(state, tmp_path / "checkpoint.pth")
    alone(average := tmp_path / "valid.acc.ave_3best.pth")
    os.utime(average, (2e9, 2e9))
    for report in (checked(tmp_path), ckptool.verify_run(tmp_path)):
        assert report.latest_good is not None
        newest = "checkpoint.pth" if value == 1.0 else "2epoch.pth"
        assert report.latest_good.path.name == newest
        assert ("a model alone" in report.chosen) == (value != 1.0)


@pytest.mark.parametrize(
    ("models", "other"),
    [
        ("llama-hf/checkpoint-{}/model.pt", "other/checkpoint-100/all.pt"),
        ("sft-merged/checkpoint-{}/model.pt", "other/checkpoint-100/all.pt"),
        ("model_b/checkpoint-{}/model.pt", "model_a/checkpoint-100/all.pt"),
        ("sft/checkpoint-{}/model.pt", "checkpoint-100/all.pt"),
        ("epoch{}.pt", "start.pt"),
        ("llama-hf-step{}.pt", "other/step_50.pt"),
    ],
)
def test_models_of_a_training_of_their_own_are_steps(
    models: str, other: str, tmp_path: Path
) -> None:
    full(tmp_path / other)
    os.utime(tmp_path / other, (1e9, 1e9))
    for step in (100, 200, 300):
        alone(tmp_path / models.format(step))
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.number == 300


def test_only_the_last_of_a_training_may_be_a_model_alone(tmp_path: Path) -> None:
    for step in (100, 200):
        state = {"model": {"w": WEIGHT}, "optimizer": OPTIMIZER, "step": step}
        torch.save(state, tmp_path / f"step_{step}.pt")
    for step in (300, 400):
        torch.save({"model": {"w": WEIGHT}}, tmp_path / f"step_{step}.pt")
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.number == 200


def test_a_training_inside_each_step_is_not_removed_with_it(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        full(tmp_path / f"checkpoint-{step}" / "all.pt")
        if step < 300:
            full(tmp_path / f"checkpoint-{step}/sft/checkpoint-500/all.pt")
    assert "remove" not in fates(pruned(tmp_path)).values()
    found = ckptool.verify_run(tmp_path, every=True)
    assert all(step.ok for step in found.steps if step.path.name == "checkpoint-300")


def test_the_data_of_exports_that_stay_is_read_before_others_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        full(tmp_path / "checkpoints" / f"step_{step}" / "all.pt")
        value = float("nan") if step == 30 else 1.0
        (folder := tmp_path / "weights" / f"step_{step}").mkdir(parents=True)
        save_file({"w": WEIGHT * value}, folder / "model.safetensors", {"format": "pt"})
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.path == tmp_path / "checkpoints" / "step_30"
    steps = pruned(tmp_path).steps
    told = {str(each.path).removeprefix(f"{tmp_path}/"): each.fate for each in steps}
    assert told["weights/step_30"] == "leave"
    assert told["weights/step_20"] == "keep"


@pytest.mark.parametrize("name", ["{}_step{}.pt", "{}/step{}.pt", "{}/checkpoint-{}/model.pt"])
def test_parts_that_no_step_has_both_of_are_of_two_trainings(name: str, tmp_path: Path) -> None:
    for part, steps in (("teacher", (100, 200)), ("student", (250, 350))):
        for step in steps:
            (file := tmp_path / name.format(part, step)).parent.mkdir(parents=True, exist_ok=True)
            has_optimizer = {"optimizer": OPTIMIZER} if part == "teacher" else {}
            torch.save({"model": {"w": WEIGHT + step}} | has_optimizer, file)
    assert [step.reasons for step in checked(tmp_path).steps] == [()] * 4
    report = ckptool.prune(tmp_path, keep_last=1)
    assert [(step.number, step.fate) for step in report.steps] == [
        (200, "keep"), (100, "remove"), (350, "keep"), (250, "remove")
    ]  # fmt: skip
