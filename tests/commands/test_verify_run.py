"""verify over a run's folder: the newest whole step, and why newer ones are passed over."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import case
from recipes.damage import DAMAGE
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.verify.run_folder import RunReport, verify_run
from ckptool.commands.verify.steps import steps_of
from ckptool.commands.verify.verify import VerifyOptions
from ckptool.errors import NotFound, Unrecognised


def saved(run: Path, *names: str) -> Path:
    """A run whose steps have these names: files by suffix, other names are DCP folders."""
    for name in names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".pt", ".ckpt", ".pth"):
            torch.save({"w": torch.ones(3)}, path)
        else:
            shutil.copytree(case("dcp_base").path, path)
    return run


def latest(run: Path) -> str | None:
    found = verify_run(run, VerifyOptions(), every=False).latest_good
    return None if found is None else str(found.step.path.relative_to(run))


def checked(run: Path) -> RunReport:
    return verify_run(run, VerifyOptions(), every=True)


@pytest.mark.parametrize(
    "names",
    [
        ("step-9", "step-10"),
        ("step_1", "step_2", "step_10"),
        ("global_step100", "global_step1000"),
        ("iter_0000100", "iter_0000200", "iter_0001000"),
        ("checkpoint-500", "checkpoint-1000"),
        ("epoch=0-step=900.ckpt", "epoch=1-step=1000.ckpt"),
        ("epoch=9-step=200.ckpt", "epoch=10-step=200.ckpt"),
        ("epoch_9.pt", "epoch_10.pt"),
        ("model_0099.pth", "model_0100.pth"),
        ("ckpt_500.pt", "ckpt_1000.pt"),
        ("last.ckpt", "step-5.ckpt"),
        ("checkpoint/step-9", "checkpoint/step-10"),
        ("2024-05-01/step-9", "2023-05-01/step-10"),
        ("step-9/actor", "step-10/actor"),
        ("Step9", "Step10"),
    ],
)
def test_steps_are_in_the_order_of_their_numbers(names: tuple[str, ...], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", *reversed(names))
    steps = [str(step.path.relative_to(run)) for step in steps_of(run)]
    assert steps == [name.removesuffix("/actor") for name in names]
    assert latest(run) == steps[-1]


@pytest.mark.parametrize("name", [n for n, one in DAMAGE.items() if one.source == "dcp_base"
                                  and one.answer == "Damaged" and not one.conversion])  # fmt: skip
def test_a_damaged_step_is_passed_over(name: str, tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1", "step-2", "step-3")
    DAMAGE[name].apply(run / "step-3")
    report = verify_run(run, VerifyOptions(), every=False)
    assert report.latest_good is not None
    assert report.latest_good.step.path == run / "step-2"
    assert [bool(one.reasons) for one in report.verified] == [True, False]


EMPTY: dict[str, Callable[[Path], object]] = {
    "an empty folder": lambda run: (run / "step-3").mkdir(),
    "an empty file in a folder": lambda run: ((run / "step-3").mkdir(),
                                              (run / "step-3" / "x.pt").touch()),
    "data without metadata": lambda run: (saved(run, "step-3") / "step-3" / ".metadata").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("state", EMPTY)
def test_a_save_that_was_only_begun_is_passed_over(state: str, tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1", "step-2")
    EMPTY[state](run)
    assert latest(run) == "step-2"
    newest = checked(run).verified[0]
    assert newest.step.path.name == "step-3"
    assert newest.reasons


def test_an_empty_file_among_files_is_passed_over(tmp_path: Path) -> None:
    run = saved(tmp_path, "step=1.ckpt", "step=2.ckpt")
    (run / "step=3.ckpt").touch()
    assert latest(run) == "step=2.ckpt"
    assert len(checked(run).verified) == 3


def test_a_step_of_several_checkpoints_is_whole_when_all_are(tmp_path: Path) -> None:
    run = saved(
        tmp_path, *(f"global_step_{n}/{part}" for n in (5, 10) for part in ("actor", "critic"))
    )
    assert latest(run) == "global_step_10"
    (run / "global_step_10" / "critic" / "__1_0.distcp").unlink()
    assert latest(run) == "global_step_5"
    shutil.rmtree(run / "global_step_10" / "critic")
    assert latest(run) == "global_step_5"


def test_what_belongs_to_no_step_is_left_alone(tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1")
    (run / "logs").mkdir()
    (run / "events.out.tfevents.17").write_bytes(b"x")
    (run / "latest").write_text("step-1")
    assert len(steps_of(run)) == 1


@pytest.mark.parametrize("name", ["dcp_base", "rank_base", "hf_consolidated", "module_state"])
def test_a_checkpoint_by_itself_is_one_step(name: str) -> None:
    (step,) = steps_of(case(name).path)
    assert step.parts


def test_files_that_are_one_a_step_are_no_ranks(tmp_path: Path) -> None:
    run = saved(tmp_path, "checkpoint_100.pt", "checkpoint_200.pt")
    assert [step.number for step in steps_of(run)] == [100, 200]


def test_none_is_whole(tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1")
    (run / "step-1" / ".metadata").unlink()
    assert latest(run) is None
    result = CliRunner().invoke(app, ["verify", str(run), "--latest-good"])
    assert (result.exit_code, result.stdout) == (1, "")


def test_where_nothing_is_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unrecognised):
        steps_of(tmp_path)
    with pytest.raises(NotFound):
        steps_of(tmp_path / "none")


def test_stdout_holds_the_path_alone(tmp_path: Path) -> None:
    run = saved(tmp_path / "a run", "step-1", "step-2")
    (run / "step-2" / "__1_0.distcp").unlink()
    command = [sys.executable, "-m", "ckptool", "verify", str(run), "--latest-good"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, f"{run}/step-1\n")
    assert "step-2" in told.stderr


def test_the_table_and_its_json(tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1", "step-2")
    (run / "step-2" / "__1_0.distcp").unlink()
    result = CliRunner().invoke(app, ["verify", str(run), "--all", "--json"])
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["latest_good"] == str(run / "step-1")
    assert [one["sound"] for one in content["verified"]] == [False, True]
    assert "1 of 2 steps" in CliRunner().invoke(app, ["verify", str(run), "--all"]).stdout
