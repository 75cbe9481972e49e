"""prune --no-optimizer: what older steps keep, also if it is killed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from fault_runs import Call
from fault_runs import run as run_with_fault
from prune_runs import damage, fates, hashes, names_in, pruned
from safetensors.torch import save_file

import ckptool
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.runs.prune.prune import PruneReport, prune
from ckptool.engine.write import commit
from ckptool.errors import UsageError
from ckptool.storage.url import RemotePath, location

EVERY = int(os.environ.get("CKPTOOL_FAULTS", "0")) or 9
"""1 for a kill at every call that changes the file system, n for each n-th."""
OPTIONS = PruneOptions(keep_last=1, keep_every=100, no_optimizer=True, yes=True)


def run_of(folder: Path, *steps: int) -> Path:
    """Save a small model and its optimizer with torch at each step."""
    run = folder / "run"
    for step in steps:
        torch.manual_seed(step)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        dcp.save(state, checkpoint_id=run / f"step-{step}", no_dist=True)
    return run


def stripped(run: Path, **options: Any) -> PruneReport:
    return pruned(run, keep_every=100, no_optimizer=True, **options)


def model_in(step: Path) -> list[torch.Tensor]:
    """Load the model with torch, which names its step."""
    state: dict[str, Any] = {"model": torch.nn.Linear(8, 4).state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=step, no_dist=True)
    assert step.name == f"step-{state['step']}"
    return list(state["model"].values())


def optimizer_in(step: Path) -> bool:
    return any(name.startswith("optimizer") for name in ckptool.open(step).tensors)


def test_older_steps_lose_the_optimizer_and_nothing_else(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 150, 200, 300)
    (run / "step-100" / "notes.txt").write_text("mine")
    before = {step: model_in(run / f"step-{step}") for step in (100, 200)}
    newest = hashes(run / "step-300")
    nbytes = sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    report = stripped(run, yes=True)
    assert [step.fate for step in report.steps] == ["keep", "strip", "remove", "strip"]
    assert names_in(run) == ["step-100", "step-200", "step-300"]
    assert hashes(run / "step-300") == newest
    assert (run / "step-100" / "notes.txt").read_text() == "mine"
    for step, was in before.items():
        assert all(
            torch.equal(a, b) for a, b in zip(model_in(run / f"step-{step}"), was, strict=True)
        )
        assert not optimizer_in(run / f"step-{step}")
        assert ckptool.verify(run / f"step-{step}", strict=step == 200).ok
    now = sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    assert nbytes - now == report.freed
    assert not stripped(run).freed


@pytest.mark.parametrize("name", ["step-{}", "step-{}.pt"])
@pytest.mark.parametrize("by_link", [False, True])
def test_a_step_without_its_optimizer_is_no_later_save(
    name: str, by_link: bool, tmp_path: Path
) -> None:
    """Else an old step would look like one of a training that began again."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: torch.ones(2)}}}
    for step in (100, 200, 300):
        path = run / name.format(step)
        torch.save(state, path) if path.suffix else dcp.save(
            state, checkpoint_id=path, no_dist=True
        )
    for file in filter(Path.is_file, run.rglob("*")):
        number = int(re.findall("[0-9]00", str(file.relative_to(run)))[0])
        os.utime(file, (number * 1000, number * 1000))
    times = times_of(run)
    report = stripped(tmp_path / "link" if by_link else run, yes=True)
    assert [step.fate for step in report.steps] == ["keep", "strip", "strip"]
    assert times_of(run) == times
    assert fates(pruned(run)) == {
        name.format(300): "keep", name.format(200): "remove", name.format(100): "remove"
    }  # fmt: skip


def times_of(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}


def test_objects_are_carried_into_the_copy_as_they_are(tmp_path: Path) -> None:
    run = run_of(tmp_path, 300)
    state = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1.0}]},
        "args": argparse.Namespace(lr=3e-4, name="run"),
    }
    dcp.save(state, checkpoint_id=run / "step-100", no_dist=True)
    assert [step.fate for step in stripped(run, yes=True).steps] == ["keep", "strip"]
    assert not optimizer_in(run / "step-100")
    loaded = {"args": None}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(loaded, checkpoint_id=run / "step-100", no_dist=True)
    assert loaded["args"] == state["args"]


def test_files_of_torch_save_are_stripped_too(tmp_path: Path) -> None:
    for step in (100, 200):
        state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: torch.ones(2)}}}
        torch.save(state, tmp_path / f"step-{step}.pt")
    assert stripped(tmp_path, yes=True).freed > 0
    assert list(torch.load(tmp_path / "step-100.pt", weights_only=True)) == ["model"]
    assert names_in(tmp_path) == ["step-100.pt", "step-200.pt"]


def test_a_module_that_is_called_like_an_optimizer_stays(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"optimizer": torch.nn.Linear(2, 2), "body": torch.nn.Linear(2, 2)})
    for step in (100, 200):
        state = {**model.state_dict(), "adam": torch.ones(2), "step": step}
        torch.save(state, tmp_path / f"step-{step}.pt")
    before = hashes(tmp_path)
    report = stripped(tmp_path, yes=True)
    assert "adam, optimizer.bias, optimizer.weight may be the model's" in report.steps[-1].reason
    assert hashes(tmp_path) == before


def test_settings_of_an_optimizer_stay(tmp_path: Path) -> None:
    for step in (100, 200):
        optimizer = {"state": {0: torch.ones(2)}, "param_groups": [{"lr": 0.1}]}
        state = {"model": {"w": torch.ones(2)}, "optim": optimizer, "opt": "adamw"}
        torch.save(state, tmp_path / f"step-{step}.pt")
    assert stripped(tmp_path, yes=True).freed > 0
    left = torch.load(tmp_path / "step-100.pt", weights_only=True)
    assert sorted(left) == ["model", "opt"]


def test_nothing_is_stripped_unless_it_is_reported(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200)
    before = hashes(run / "step-100")
    assert fates(stripped(run)) == {"step-200": "keep", "step-100": "strip"}
    assert hashes(run / "step-100") == before
    with pytest.raises(UsageError, match="requires --keep-every"):
        pruned(run, no_optimizer=True)


def test_what_is_pointed_to_or_damaged_stays_whole(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200, 300, 400)
    (run / "latest").write_text("step-100")
    (run / "best").symlink_to("step-200")
    damage(run / "step-300")
    before = {step: hashes(run / f"step-{step}") for step in (100, 200, 300)}
    stripped(run, yes=True)
    assert {step: hashes(run / f"step-{step}") for step in before} == before


def test_a_format_that_is_not_written_keeps_its_optimizer(tmp_path: Path) -> None:
    for step in (100, 200):
        shutil.copytree(case("deepspeed_zero_2").path, tmp_path / f"step-{step}")
    before = hashes(tmp_path / "step-100" / "global_step1")
    report = stripped(tmp_path, yes=True, quick=True)
    older = next(step for step in report.steps if step.path.name == "step-100")
    assert older.fate == "keep"
    assert "its optimizer stays: deepspeed is incomplete without" in older.reason
    assert hashes(tmp_path / "step-100" / "global_step1") == before


def test_a_format_that_is_written_in_another_folder_stays_as_it_is(tmp_path: Path) -> None:
    """ckptool writes Megatron's checkpoints as a release, with a tracker."""
    source = next(case("megatron_torch_dist").path.glob("iter_*"))
    for step in (100, 200):
        shutil.copytree(source, tmp_path / f"iter_{step:07d}")
    before = hashes(tmp_path)
    report = stripped(tmp_path, yes=True, quick=True)
    assert "in other folders" in report.steps[-1].reason
    assert hashes(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "inner", "files"),
    [
        ("rank_verl", "global_step_5/actor", [f"optim_world_size_2_rank_{r}.pt" for r in (0, 1)]),
        ("accelerate_folders", "",
         [f"optimizer_0/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")]),
        ("accelerate_rank_files", "", ["optimizer_0_rank0.bin", "optimizer_0_rank1.bin"]),
    ],
    ids=["verl", "folders", "rank files"],
)  # fmt: skip
def test_files_that_hold_an_optimizer_alone_go(
    name: str, inner: str, files: list[str], tmp_path: Path
) -> None:
    for step in (100, 200):
        shutil.copytree(case(name).path / inner, tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / "notes.txt").write_text("mine")
    before = hashes(tmp_path / "step-100")
    freed = stripped(tmp_path, yes=True).freed
    after = hashes(tmp_path / "step-100")
    assert before.keys() - after.keys() == {*files}
    assert {name: before[name] for name in after} == after
    sizes = [(tmp_path / "step-200" / file).stat().st_size for file in files]
    assert freed == sum(sizes)
    assert ckptool.verify(tmp_path / "step-100").ok
    assert not stripped(tmp_path).freed


def trainer_steps(folder: Path) -> Path:
    """Leave what transformers' Trainer leaves at two steps."""
    for step in (100, 200):
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        at = folder / f"checkpoint-{step}"
        at.mkdir(parents=True)
        save_file(model.state_dict(), at / "model.safetensors", {"format": "pt"})
        torch.save(optimizer.state_dict(), at / "optimizer.pt")
        torch.save({"last_epoch": 3}, at / "scheduler.pt")
    return folder


def test_the_optimizer_of_transformers_trainer_is_seen_and_goes(tmp_path: Path) -> None:
    run = trainer_steps(tmp_path / "run")
    assert [step.optimizer for step in ckptool.list_steps(run).steps] == [True, True]
    before = hashes(run / "checkpoint-100")
    assert stripped(run, yes=True).freed == (run / "checkpoint-200" / "optimizer.pt").stat().st_size
    assert [step.optimizer for step in ckptool.list_steps(run).steps] == [True, False]
    before.pop("optimizer.pt")
    assert hashes(run / "checkpoint-100") == before
    other = trainer_steps(tmp_path / "other")
    torch.save({"state": {}, "ema": torch.ones(2)}, other / "checkpoint-100" / "optimizer.pt")
    assert "optimizer.pt is not an optimizer's state dict" in stripped(other).steps[-1].reason


def test_the_last_optimizer_of_a_run_stays(tmp_path: Path) -> None:
    """The newest step was saved without one: training resumes from the one before it."""
    run = trainer_steps(tmp_path / "run")
    (run / "checkpoint-200" / "optimizer.pt").unlink()
    report = stripped(run, yes=True)
    assert not report.freed
    assert report.steps[0].reason.endswith("optimizer is missing; every earlier whole step has it")
    assert (run / "checkpoint-100" / "optimizer.pt").exists()


def test_what_a_list_of_files_names_stays(tmp_path: Path) -> None:
    run = trainer_steps(tmp_path / "run")
    step = run / "checkpoint-100"
    listed = {name: f"sha256:{digest}" for name, digest in hashes(step).items()}
    (step / "integrity.json").write_text(json.dumps({"algorithm": "md5", "files": listed}))
    assert "integrity.json lists optimizer.pt" in stripped(run, yes=True).steps[-1].reason
    assert (step / "optimizer.pt").exists()


def test_a_link_beside_an_optimizer_stays_a_link(tmp_path: Path) -> None:
    for step in (100, 200):
        shutil.copytree(case("accelerate_rank_files").path, tmp_path / f"checkpoint-{step}")
    (tmp_path / "shared.txt").write_text("x")
    (tmp_path / "checkpoint-100" / "notes.txt").symlink_to("../shared.txt")
    assert "notes.txt is a symbolic link" in stripped(tmp_path, yes=True).steps[-1].reason
    assert (tmp_path / "checkpoint-100" / "notes.txt").is_symlink()


def test_a_single_file_goes_from_a_store_too(tmp_path: Path) -> None:
    run = location(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(run, RemotePath)
    for file in trainer_steps(tmp_path / "run").rglob("*.*"):
        (run / file.parent.name / file.name).write_bytes(file.read_bytes())
    report = prune(location(str(run)), OPTIONS)
    assert [step.fate for step in report.steps] == ["keep", "strip"]
    left = location(str(run))
    assert isinstance(left, RemotePath)
    assert "checkpoint-200/optimizer.pt" in left.listing
    assert "checkpoint-100/optimizer.pt" not in left.listing
    assert len(left.listing) == 5


def test_a_step_of_which_no_optimizer_is_read_says_so(tmp_path: Path) -> None:
    for step in (100, 200):
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / f"step-{step}.pt")
    assert stripped(tmp_path, yes=True).steps[-1].reason.endswith("no optimizer found in it")


def test_a_step_of_a_store_keeps_its_optimizer(tmp_path: Path) -> None:
    run = location(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(run, RemotePath)
    for step in run_of(tmp_path, 100, 200).iterdir():
        for file in step.iterdir():
            (run / step.name / file.name).write_bytes(file.read_bytes())
    before = sorted(run.listing)
    report = prune(location(str(run)), OPTIONS)
    assert "its optimizer stays: stores cannot replace" in report.steps[-1].reason
    assert sorted(location(str(run)).listing) == before  # type: ignore[union-attr]


def test_killed_at_any_call_each_step_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    source = run_of(tmp_path, 100, 250, 300)
    run, log = tmp_path / "copy", tmp_path / "log"
    words = [*"prune --keep-last 1 --keep-every 100 --no-optimizer --yes".split(), "-q"]
    shutil.copytree(source, run)
    ended = run_with_fault([*words, str(run)], log)
    assert ended.code == 0, ended.words
    after = {step.name: hashes(step) for step in run.iterdir()}
    before = {name: hashes(source / name) for name in after}
    assert after["step-100"] != before["step-100"]
    for number in range(1, len(ended.calls) + 1, EVERY):
        shutil.rmtree(run)
        shutil.copytree(source, run)
        killed = run_with_fault([*words, str(run)], log, "KILL", Call("call", number))
        assert killed.code == -signal.SIGKILL
        assert hashes(run / "step-300") == before["step-300"]
        assert hashes(run / "step-100") in (before["step-100"], after["step-100"])
        prune(run, OPTIONS)
        assert {step.name: hashes(step) for step in run.iterdir()} == after


def test_the_next_removal_finishes_what_was_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, 100, 200)

    def killed_here(self: object, note: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commit.FolderCommit, "clear", killed_here)
        with pytest.raises(KeyboardInterrupt):
            prune(run, OPTIONS)
    assert not optimizer_in(run / "step-100")
    assert ".step-100.partial" in names_in(run)
    pruned(run, 2, yes=True)
    assert names_in(run) == ["step-100", "step-200"]
