"""``ckptool PATH``, and ``inspect`` of a run's folder and of a damaged checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import case
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.errors import Damaged, Several, Unrecognized


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two whole steps, one without a file, one whose save never finished."""
    folder = tmp_path / "run"
    for step in (5, 100, 30, 7):
        shutil.copytree(case("dcp_fsdp2_tp").path, folder / f"step-{step}")
    (folder / "step-30" / "__1_0.distcp").unlink()
    (folder / "step-100" / ".metadata").unlink()
    for file in (folder / "step-7").iterdir():
        os.utime(file, (1_000_000_000, 1_000_000_000))
    return folder


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def test_the_steps_of_a_run(run: Path) -> None:
    listed = ckptool.list_steps(run)
    assert [(step.number, step.complete) for step in listed.steps] == [
        (100, False), (30, False), (7, True), (5, True)
    ]  # fmt: skip
    old = listed.steps[2]
    assert old.saved is not None
    assert old.mesh is not None
    assert old.saved.timestamp() == 1_000_000_000
    assert old.nbytes == sum(file.stat().st_size for file in (run / "step-7").iterdir())
    assert (old.optimizer, old.ranks, old.mesh.shape, old.formats) == (True, 4, (2, 2), ("dcp",))
    assert "__1_0.distcp" in listed.steps[1].reasons[0]
    assert ".metadata" in listed.steps[0].reasons[0]


def test_all_commands_list_the_steps_of_a_run_alike(run: Path) -> None:
    numbers = [100, 30, 7, 5]
    for words in (["inspect"], ["verify", "--all"], ["prune", "--keep-last", "9"]):
        told = json.loads(invoke(*words, run, "--json").stdout)["steps"]
        assert [step["number"] for step in told] == numbers
        assert [step["path"] for step in told] == [f"{run}/step-{n}" for n in numbers]


def test_a_run_of_shards_whose_metadata_lies_beside_each_step(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(case("torch_checkpointing_safetensors").path, tmp_path / f"step-{step}")
    assert invoke("inspect", tmp_path).exit_code == 0
    assert [step.complete for step in ckptool.list_steps(tmp_path).steps] == [True, True]


def test_a_run_without_an_optimizer(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(case("hf_shards").path, tmp_path / f"checkpoint-{step}")
    assert [step.optimizer for step in ckptool.list_steps(tmp_path).steps] == [False, False]


@pytest.mark.parametrize(("name", "step"), [("deepspeed_zero_2", 1), ("megatron_torch_dist", 100)])
def test_a_run_whose_trainer_names_the_latest_is_listed(
    name: str, step: int, tmp_path: Path
) -> None:
    shutil.copytree(case(name).path, tmp_path, dirs_exist_ok=True)
    alone = invoke(tmp_path).stdout
    latest = next(path for path in tmp_path.iterdir() if path.is_dir())
    shutil.copytree(latest, later := tmp_path / latest.name.replace(str(step), str(step + 50)))
    told = json.loads(invoke(tmp_path, "--json").stdout)
    assert [(one["path"], one["pointer"]) for one in told["steps"]] == [
        (str(later), None), (str(latest), next(p.name for p in tmp_path.glob("latest*")))
    ]  # fmt: skip
    assert f"points to {latest.name}" in invoke(tmp_path).stdout
    assert " tensors of " in alone
    assert ckptool.open(tmp_path).step == step


def test_a_pointer_to_a_step_that_is_not_there(run: Path) -> None:
    (run / "latest").write_text("step-9")
    told = json.loads(invoke(run, "--json").stdout)
    assert told["dangling"] == {"latest": "step-9"}
    assert "  latest names step-9, which is not there" in invoke(run).stdout.splitlines()


def test_files_that_only_mention_steps_are_one_line(run: Path) -> None:
    for name in ("README.md", "train.sh", "a.txt", "b.txt"):
        (run / name).write_text("resumed from step-5, see step-7\n")
    (run / "latest").write_text("step-7")
    run.with_name("mine").symlink_to(run / "step-5")
    told = json.loads(invoke(run, "--json").stdout)
    assert [step["pointer"] for step in told["steps"]] == [None, None, "latest", "../mine"]
    assert told["mentions"] == ["README.md", "a.txt", "b.txt", "train.sh"]
    said = invoke(run).stdout.splitlines()
    assert "  steps are also named in README.md, a.txt, b.txt and 1 more" in said
    assert sum("points to" in line for line in said) == 2


@pytest.mark.parametrize("words", [("inspect",), ()])
def test_inspect_of_a_run_lists_its_steps(words: tuple[str, ...], run: Path) -> None:
    found = json.loads(invoke(*words, run, "--json").stdout)
    assert found["schema"] == "ckptool.inspect-run/2"
    assert [(step["number"], step["complete"]) for step in found["steps"]] == [
        (100, False), (30, False), (7, True), (5, True)
    ]  # fmt: skip
    assert found["steps"][2]["saved"] == "2001-09-09T01:46:40+00:00"


def test_checkpoints_without_numbers_are_not_called_steps(run: Path) -> None:
    for name, number in (("unet", 5), ("vae", 7)):
        shutil.copytree(run / f"step-{number}", run.with_name("pipe") / name)
    title, _, heads, *rows = invoke("inspect", run.with_name("pipe")).stdout.splitlines()
    assert title == f"{run.with_name('pipe')}  2 checkpoints, 2 complete"
    assert heads.split()[0] == "checkpoint"
    assert {row.split()[0] for row in rows[:2]} == {"unet", "vae"}


def test_what_is_asked_of_one_checkpoint_needs_one(run: Path) -> None:
    done = invoke("inspect", run, "--tensors", "*")
    assert isinstance(done.exception, Several)
    assert isinstance(done.exception, Unrecognized)


def test_a_path_is_inspected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert invoke("step-5").stdout == invoke("inspect", "step-5").stdout != ""
    assert invoke("step-5", "--json").stdout == invoke("inspect", "step-5", "--json").stdout
    missing = invoke("nowhere/step-5").exception
    assert "no such file" in str(missing)


def test_of_a_damaged_checkpoint_what_can_be_read_and_then_the_problems(tmp_path: Path) -> None:
    shutil.copytree(case("rank_base").path, tmp_path / "ckpt")
    file = min((tmp_path / "ckpt").iterdir())
    os.truncate(file, 900)
    done = invoke(tmp_path / "ckpt")
    assert isinstance(done.exception, Damaged)
    assert done.exception.exit_code == 3
    assert "5 tensors" in done.stdout
    assert f"{file.name}: no zip directory" in str(done.exception)
    found = invoke(tmp_path / "ckpt", "--json")
    assert found.exit_code == 3
    assert any("no zip directory" in problem for problem in json.loads(found.stdout)["problems"])
    with pytest.raises(Damaged):
        ckptool.inspect(tmp_path / "ckpt")


def test_a_checkpoint_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 64)
    done = invoke(tmp_path / "m.safetensors")
    assert isinstance(done.exception, Damaged)
    assert done.stdout == ""
