"""What a name counts, and the order of a run's steps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import case
from hypothesis import given
from hypothesis import strategies as st
from prune_runs import names_in, pruned
from trainer_runs import CLOCK, WEIGHT, age
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.runs.names import parse_name

FOLDER, FILE = True, False


@pytest.mark.parametrize(
    ("name", "stage", "epoch", "step"),
    [
        ("step-100", None, None, 100),
        ("global_step1000", None, None, 1000),
        ("iter_0000100", None, None, 100),
        ("iter_40k.pth", None, None, 40_000),
        ("checkpoint-500", None, None, 500),
        ("checkpoint-4bit-step-9", None, None, 9),
        ("epoch=1-step=20.ckpt", None, 1, 20),
        ("epoch=03-val_loss=0.12-step=500.ckpt", None, 3, 500),
        ("epoch=1-acc_epoch=93.ckpt", None, 1, None),
        ("epoch=1-train_loss_step=0.25.ckpt", None, 1, None),
        ("best_coco_bbox_mAP_epoch_9.pth", None, 9, None),
        ("val_loss_0.25_epoch_3.pt", None, 3, None),
        ("ep2-ba31-rank0.pt", None, 2, 31),
        ("checkpoint-3.pth.tar", None, 3, None),
        ("recovery-3-100.pth.tar", None, 3, 100),
        ("stage2-ingredient1-step1000-tokens2098B", 2, None, 1000),
        ("iter_0000100_3_local.pt", None, None, 100),
        ("gpt--val_loss=0.12-step=100-consumed_samples=3200.0", None, None, 100),
        ("Llama-3.1-8B-step-100", None, None, 100),
        ("fold0_epoch3.pt", None, 3, None),
        ("best_model_9_val_acc=0.6123.pt", None, None, 9),
        ("checkpoint_1_500.pt", None, 1, 500),
        ("rl_model_80_steps.zip", None, None, 80),
        ("net-10-epochs.pt", None, 10, None),
        ("rl_model_20000000_steps", None, None, 20_000_000),
        ("step_20240501", None, None, 20_240_501),
        ("sdxl_lightning_4step_unet.pth", None, None, None),
        ("max_80_steps.pt", None, None, None),
        ("max_steps=1000", None, None, None),
    ],
)
def test_what_a_name_counts(
    name: str, stage: int | None, epoch: int | None, step: int | None
) -> None:
    found = parse_name(name, is_folder="." not in name).position
    assert (found.stage, found.epoch, found.step) == (stage, epoch, step)


@pytest.mark.parametrize(
    "name",
    [
        "best-val_loss=0.261.ckpt", "best-loss-2.31.pt", "acc_93.5.pt", "acc_93.pt", "acc93.pt",
        "llama-7b.pt", "llama-70B", "mixtral-8x7b", "gpt-1.5b", "run3.pt", "fold_2.pth", "exp-12",
        "seed42", "version_3", "model-v2", "2024-05-01", "20240501_120000.pt", "05-01-2024-run",
        "model-00001-of-00002.safetensors", "step_1e3", "w4a16.pt", "model.fp16.pt", "top5_71.pt",
        "deadbee1", "rank3.pt", "shard_7.pt", "epoch=x-val_loss=12.ckpt",
        "CKPT+2026-11-29+06-00-04+01", "checkpoint_2026-11-29_06-00-02.123456",
        "valid.acc.ave_10best.pth",
    ],
)  # fmt: skip
def test_other_numbers_are_no_step(name: str) -> None:
    found = parse_name(name, is_folder="." not in name)
    assert not found.position
    if name != "05-01-2024-run":
        assert found.bare is None


@given(
    st.sampled_from(["loss", "val_loss", "acc", "f1", "bleu"]),
    st.floats(0, 1e6),
    st.integers(0, 9**9),
)
def test_a_metric_never_counts(metric: str, value: float, epoch: int) -> None:
    for text in (f"{value:.4f}", f"{value:.0f}", f"{value:e}"):
        name = parse_name(f"epoch={epoch}-{metric}={text}.ckpt", is_folder=FILE)
        assert (name.position.epoch, name.position.step) == (epoch, None)
        assert name.kind == f"epoch=#-{metric}=~.ckpt"
        alone = parse_name(f"best-{metric}={text}.ckpt", is_folder=FILE)
        assert not alone.position
        assert alone.bare is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fold0_epoch1.pt", "fold1_epoch2.pt"),
        ("llama-7b-step-1", "llama-70b-step-2"),
        ("Llama-3.1-step-1", "Llama-3.2-step-2"),
        ("lr0.1-step-1", "lr0.01-step-2"),
        ("epoch=1.ckpt", "epoch=2-v1.ckpt"),
        ("seed1-step-1", "seed2-step-2"),
        ("stage1-step1", "stage2-step2"),
        ("2024-05-01-step-1", "2024-05-02-step-2"),
        ("step-1", "step-1-ema"),
    ],
)
def test_other_numbers_tell_series_apart(one: str, other: str) -> None:
    first, second = (parse_name(name, is_folder="." not in name) for name in (one, other))
    assert first.kind != second.kind
    if not other.endswith("-ema"):
        assert first.family != second.family


@pytest.mark.parametrize("suffix", [".pt", ".pth.tar", ".npy", ".pickle", ".safetensors"])
def test_files_of_one_step_may_differ_in_suffixes(suffix: str) -> None:
    first, second = (
        parse_name(name, is_folder=False) for name in ("m_step3.pt", "m_step3" + suffix)
    )
    assert first.family == second.family


def saved(run: Path, name: str, minute: int, **values: object) -> None:
    run.mkdir(exist_ok=True)
    torch.save({"state_dict": {"w": WEIGHT}, **values}, run / name)
    age(run / name, minute)


def newest(run: Path) -> tuple[str, str]:
    report = ckptool.verify_run(run, quick=True)
    assert report.latest_good is not None
    return report.latest_good.path.name, report.chosen


def test_without_a_named_number_the_recorded_one_places(tmp_path: Path) -> None:
    for minute, (name, epoch) in enumerate([("c.ckpt", 1), ("a.ckpt", 3), ("b.ckpt", 2)]):
        saved(tmp_path / "run", name, minute, epoch=epoch)
    assert newest(tmp_path / "run")[0] == "a.ckpt"
    assert newest(tmp_path / "run")[1].startswith("by the epoch that it records")


def test_without_any_number_time_places(tmp_path: Path) -> None:
    for minute, loss in enumerate(["0.261", "0.149", "0.900", "0.300"]):
        saved(tmp_path / "run", f"best-val_loss={loss}.ckpt", minute)
    name, chosen = newest(tmp_path / "run")
    assert name == "best-val_loss=0.300.ckpt"
    assert chosen.startswith("by the time")


def test_the_best_is_no_newer_than_what_was_saved_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (1, 2):  # as skrl saves
        saved(run, f"agent_{number}00.pt", number)
    saved(run, "best_agent.pt", 2)
    os.utime(run / "best_agent.pt", ns=(0, (run / "agent_200.pt").stat().st_mtime_ns + 10**8))
    assert newest(run)[0] == "agent_200.pt"
    age(run / "best_agent.pt", 3)
    assert newest(run)[0] == "best_agent.pt"


@pytest.mark.parametrize("name", ["model_{}.pth", "runner.{:04}.pth"])
def test_numbers_without_a_word_count_unless_time_contradicts(name: str, tmp_path: Path) -> None:
    for minute, number in enumerate([99, 100, 1000]):
        saved(tmp_path / "run", name.format(number), minute)
    assert newest(tmp_path / "run") == (
        name.format(1000), "by the number in its name, which agrees with the time at which it was"
        " saved",
    )  # fmt: skip
    age(tmp_path / "run" / name.format(99), 50)
    found, chosen = newest(tmp_path / "run")
    assert (found, chosen.startswith("by the time")) == (name.format(99), True)


def test_a_pointer_to_the_latest_places_what_counts_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for minute, name in enumerate(["alpha.pt", "beta.pt", "gamma.pt"]):
        saved(run, name, minute)
    (run / "latest").write_text("beta.pt")
    assert newest(run)[0] == "beta.pt"
    (run / "latest").unlink()
    (run / "best").write_text("beta.pt")
    assert newest(run)[0] == "gamma.pt"


def test_the_last_by_what_it_records_among_named_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for epoch in (1, 2):
        saved(
            run, f"epoch={epoch}-step={epoch * 10}.ckpt", epoch, epoch=epoch, global_step=epoch * 10
        )
    saved(run, "last.ckpt", 0, epoch=2, global_step=20)
    assert newest(run)[0] == "epoch=2-step=20.ckpt"
    saved(run, "last.ckpt", 0, epoch=2, global_step=25)
    assert newest(run)[0] == "last.ckpt"


@pytest.mark.parametrize("name", ["checkpoint_{}.pt", "checkpoint{:04}.pth"])
def test_the_last_by_what_it_records_past_the_newest_named_step(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for epoch in (10, 20):
        saved(run, name.format(epoch), epoch, epoch=epoch - 1)
    for minute, recorded in ((21, 9), (21, 19), (0, 300)):  # the last: what training began from
        saved(run, "checkpoint.pth", minute, epoch=recorded)
        assert newest(run)[0] == name.format(20)
    saved(run, "checkpoint.pth", 21, epoch=20)
    assert newest(run) == ("checkpoint.pth", "by the epoch that it records")


def test_what_is_saved_within_an_epoch_comes_before_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saves = [("recovery-1-90", 1), ("checkpoint-1", 1), ("recovery-2-60", 2), ("recovery-2-90", 2)]
    for minute, (name, epoch) in enumerate(saves):  # as timm saves
        saved(run, f"{name}.pth.tar", minute, epoch=epoch)
    assert newest(run) == ("recovery-2-90.pth.tar", "by the epoch and step in its name")
    saved(run, "last.pth.tar", 8, epoch=1)
    assert newest(run)[0] == "recovery-2-90.pth.tar"
    saved(run, "last.pth.tar", 9, epoch=2)
    assert newest(run) == ("last.pth.tar", "by the epoch that it records")
    saved(run, "checkpoint-2.pth.tar", 9, epoch=2)
    assert newest(run) == ("checkpoint-2.pth.tar", "by the epoch in its name")


def test_the_last_of_fairseq_may_be_some_updates_into_an_epoch(tmp_path: Path) -> None:
    for name, updates in (("checkpoint_1_1000.pt", 1000), ("checkpoint_last.pt", 1500)):
        history = [{"num_updates": 300}, {"num_updates": updates}]
        values = {"extra_state": {"train_iterator": {"epoch": 1}}, "optimizer_history": history}
        saved(tmp_path / "run", name, updates, **values)
    assert newest(tmp_path / "run")[0] == "checkpoint_last.pt"


def test_what_lies_apart_is_no_later_step_of_a_run(tmp_path: Path) -> None:
    for epoch in (1, 2):
        saved(tmp_path / "run", f"checkpoint_{epoch}.pt", epoch, epoch=epoch)
    saved(tmp_path / "run" / "base", "model.pt", 3, epoch=300)
    assert newest(tmp_path / "run")[0] == "checkpoint_2.pt"


def test_versions_of_one_name_are_in_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("epoch=1.ckpt", "epoch=1-v2.ckpt", "epoch=1-v10.ckpt", "epoch=0-v11.ckpt"):
        saved(run, name, 1)
    assert newest(run)[0] == "epoch=1-v10.ckpt"


def test_stages_come_before_steps(tmp_path: Path) -> None:
    for name in ("stage1-step900.pt", "stage2-step10.pt"):
        saved(tmp_path / "run", name, 1)
    assert newest(tmp_path / "run")[0] == "stage2-step10.pt"


def test_epochs_and_steps_are_not_compared(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for minute, name in enumerate(["step-900.pt", "epoch-3.pt"]):
        saved(run, name, minute)
    name, chosen = newest(run)
    assert name == "epoch-3.pt"
    assert "some names count epochs, others steps" in chosen


def test_where_the_order_is_unclear_nothing_goes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    names = [f"model-acc={acc}.pt" for acc in (91, 95, 93)] + [
        "m_1.pt",
        "m_2.pt",
        "7b.pt",
        "70b.pt",
    ]
    for minute, name in enumerate(names):
        saved(run, name, minute)
    report = pruned(run, yes=True, quick=True)
    assert names_in(run) == sorted(names)
    assert {step.fate for step in report.steps} == {"leave"}
    assert all("does not say" in step.reason for step in report.steps)


def test_how_it_was_chosen_is_said_on_stderr(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path / "run", f"step-{step}.pt", 3 - step)
    words = ["verify", str(tmp_path / "run"), "--latest-good"]
    told = CliRunner().invoke(app, words)
    assert told.stdout == f"{tmp_path}/run/step-2.pt\n"
    assert "newest by the step in its name; step-1.pt was written later" in told.stderr
    assert CliRunner().invoke(app, [*words, "--quiet"]).stderr == ""
    assert os.path.getmtime(tmp_path / "run" / "step-1.pt") == CLOCK + 120


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("step-2.pt", ""),
        ("step-1.pt", "; latest names step-1.pt"),
        ("step-3.pt", "; latest names step-3.pt"),  # which is not good
        ("step-9.pt", "; latest names step-9.pt, which is not there"),
    ],
)
def test_a_step_is_said_that_a_trainer_would_resume_from(
    named: str, expected: str, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, f"step-{step}.pt", min(step, 2))
    os.truncate(tmp_path / "step-3.pt", 100)
    os.utime(tmp_path / "step-3.pt", (CLOCK, CLOCK))
    (tmp_path / "latest").write_text(named)
    (tmp_path / "notes.txt").write_text("step-1.pt was fine")
    report = ckptool.verify_run(tmp_path)
    assert report.chosen == f"by the step in its name{expected}"


def test_a_step_is_newer_than_what_was_made_of_it(tmp_path: Path) -> None:
    for name in ("deepspeed_zero_2", "deepspeed_universal"):
        shutil.copytree(case(name).path, tmp_path / "run", dirs_exist_ok=True)
    report = ckptool.verify_run(tmp_path / "run", every=False)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "global_step1"
