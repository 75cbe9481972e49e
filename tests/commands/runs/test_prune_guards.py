"""What prune never does: leave the run, part what belongs together, or rest on what has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from prune_runs import after_each_removal, fates, hashes, names_in, pruned
from trainer_runs import BOTH, OPTIMIZER, TRAINERS, WEIGHT, age, of_dcp, run_of, write_step
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.runs.prune.prune import prune
from ckptool.engine.write import removal
from ckptool.errors import Changed, TransferError
from ckptool.storage.url import RemotePath, location

SOURCE = case("dcp_base").path


def steps(run: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(SOURCE, run / name)
    return run


def reasons(run: Path, **options: Any) -> dict[str, str]:
    report = pruned(run, quick=True, **options)
    return {str(step.path).removeprefix(f"{run}/"): step.reason for step in report.steps}


def test_steps_behind_a_link_are_another_teams(tmp_path: Path) -> None:
    other = steps(tmp_path / "other", "step-1", "step-2", "step-3", ".step-0.ckptool-removed")
    run = steps(tmp_path / "run", "step-5")
    (run / "shared").symlink_to(other)
    (run / "step-4").symlink_to(other / "step-1")
    (run / "sub").mkdir()
    (run / "sub" / "deep").symlink_to("../../other")
    pruned(run, yes=True, quick=True)
    assert names_in(other) == [".step-0.ckptool-removed", "step-1", "step-2", "step-3"]
    assert reasons(run)["shared/step-1"].startswith("a symbolic link leads to ")
    assert names_in(run) == ["shared", "step-4", "step-5", "sub"]


def test_a_run_that_is_named_by_a_link_is_pruned(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    (tmp_path / "current").symlink_to("run")
    pruned(tmp_path / "current", yes=True, quick=True)
    assert names_in(run) == ["step-2"]


def test_a_mount_in_a_step_leaves_it(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2", "step-3")
    precious, inside = tmp_path / "precious", run / "step-1" / "data"
    precious.mkdir()
    (precious / "thesis").write_text("mine")
    inside.mkdir()
    if subprocess.run(["mount", "--bind", precious, inside], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        pruned(run, yes=True, quick=True)
        assert names_in(run) == ["step-1", "step-3"]
        assert reasons(run)["step-1"] == f"another file system is mounted at {inside}"
    finally:
        subprocess.run(["umount", inside], check=True)
    assert (precious / "thesis").exists()


@pytest.mark.parametrize(
    "inner", ["a/b/c/d/e/step-9", "a/b/c/d/e/f/g/h/epoch=3", "logs/version_0/checkpoint-500/x"]
)
def test_a_run_in_a_step_stays_however_deep(inner: str, tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    shutil.copytree(SOURCE, run / "step-1" / inner)
    pruned(run, yes=True, quick=True)
    assert (run / "step-1" / inner / ".metadata").exists()
    assert reasons(run)["step-1"].startswith("holds steps of its own, as ")


def test_the_steps_of_a_run_in_a_step_stay_all(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"], (1, 60, 100))
    steps(run / "checkpoint-60" / "finetune", "step-3", "step-7")
    pruned(run, yes=True, quick=True)
    assert names_in(run) == ["checkpoint-100", "checkpoint-60"]
    inner = run / "checkpoint-60" / "finetune"
    assert names_in(inner) == ["step-3", "step-7"]
    before = hashes(inner)
    pruned(run, yes=True, quick=True, keep_every=1, no_optimizer=True)
    assert hashes(inner) == before


def test_a_file_of_another_step_deep_in_a_step(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    file = run / "step-1" / "a" / "b" / "c" / "d" / "e" / "epoch=4.ckpt"
    file.parent.mkdir(parents=True)
    torch.save(BOTH, file)
    pruned(run, yes=True, quick=True)
    assert file.exists()


def test_what_cannot_be_listed_in_full_stays(tmp_path: Path) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2")
    (run / "step-1").joinpath(*["x"] * 40).mkdir(parents=True)
    pruned(run, yes=True, quick=True)
    assert "cannot be looked through" in reasons(run)["step-1"]


PAIRS: dict[str, tuple[str, str]] = {
    "files": ("model_step{}.pt", "opt_step{}.pt"),
    "files by suffix": ("step{}_model.pt", "step{}_optim.pt"),
    "folders": ("model/step-{}.pt", "optim/step-{}.pt"),
    "roles": ("_actor/global_step{}.pt", "_critic/global_step{}.pt"),
    "ranks": ("ep{0}-ba{0}-rank0.pt", "ep{0}-ba{0}-rank1.pt"),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("fault", ["damaged", "missing", "empty"])
def test_what_belongs_together_stays_together(pair: str, fault: str, tmp_path: Path) -> None:
    """Each file is a checkpoint by itself; the newest of one kind is not whole."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        for name, state in zip(PAIRS[pair], ({"model": {"w": WEIGHT}}, OPTIMIZER), strict=True):
            path = run / name.format(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
            age(path, step)
    other = run / PAIRS[pair][1].format(3)
    if fault == "missing":
        other.unlink()
    else:
        os.truncate(other, 100 if fault == "damaged" else 0)
    pruned(run, yes=True)
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {name.format(2) for name in PAIRS[pair]} <= left
    assert not {name.format(1) for name in PAIRS[pair]} & left


def test_parts_of_any_name_stay_together(tmp_path: Path) -> None:
    """No word of the names says what they are; the content does."""
    for step in (1, 2, 3):
        torch.save({"model": {"w": WEIGHT}}, tmp_path / f"foo_step{step}.pt")
        torch.save({"optimizer": OPTIMIZER}, tmp_path / f"bar_step{step}.pt")
    os.truncate(tmp_path / "bar_step3.pt", 100)
    pruned(tmp_path, yes=True)
    assert {"foo_step2.pt", "bar_step2.pt"} <= set(names_in(tmp_path))


SIDE_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("file", SIDE_FILES)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_files_beside_the_weights_are_whole_too(file: str, share: float, tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"])
    path = run / "checkpoint-3" / file
    os.truncate(path, int(path.stat().st_size * share))
    report = ckptool.verify_run(run)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "checkpoint-2"
    assert file in report.steps[0].reasons[0]


def test_exports_beside_the_steps_do_not_fail_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["torchtitan"])
    of_dcp("dataloader")(run / "ft-replicat-0" / "step-3")
    assert ckptool.verify_run(run, every=True)


def test_the_last_step_with_an_optimizer_stays_whatever_else(tmp_path: Path) -> None:
    """Newer steps have no optimizer, as after the last save of a model alone."""
    for step in (1, 2):
        of_dcp("model", "optimizer")(tmp_path / f"step-{step}")
    report = pruned(tmp_path, yes=True, quick=True, keep_every=7)
    assert names_in(tmp_path) == ["step-2"]
    assert report.good == 1
    for step in (3, 4):
        of_dcp("model")(tmp_path / f"step-{step}")
    pruned(tmp_path, yes=True, quick=True)
    assert names_in(tmp_path) == ["step-2", "step-3", "step-4"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_with_values_that_are_none_is_not_good(value: float, tmp_path: Path) -> None:
    for step, weight in ((1, 1.0), (2, 1.0), (3, value)):
        state = {"model": {"w": torch.full((3,), weight)}, "optimizer": OPTIMIZER}
        torch.save(state, tmp_path / f"step-{step}.pt")
    latest = ckptool.verify_run(tmp_path)
    assert latest.latest_good is not None
    assert latest.latest_good.path.name == "step-2.pt"
    assert "not-finite" in latest.steps[0].reasons[0]
    assert "--allow-nonfinite counts it as good" in latest.steps[0].reasons[0]
    assert not ckptool.verify_run(tmp_path, every=True)
    allowed = ckptool.verify_run(tmp_path, allow_nonfinite=True)
    assert allowed.steps[0].ok
    assert fates(pruned(tmp_path))["step-2.pt"] == "keep"
    assert fates(pruned(tmp_path, allow_nonfinite=True))["step-2.pt"] == "remove"
    told = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1", "--yes"])
    assert f"`rm -r {tmp_path / 'step-3.pt'}`" in told.stdout.replace("\n", " ")
    assert names_in(tmp_path) == ["step-2.pt", "step-3.pt"]


def test_a_step_whose_resume_is_another_model_is_not_good(tmp_path: Path) -> None:
    for step, shift in ((1, 0.0), (2, 0.0), (3, 0.5)):
        master = torch.linspace(-1, 1, 12).reshape(3, 4)
        state = {"w": (master + shift).bfloat16(), "optimizer.state.fp32_param.w": master}
        dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    latest = ckptool.verify_run(tmp_path)
    assert latest.latest_good is not None
    assert latest.latest_good.path.name == "step-2"
    (reason,) = latest.steps[0].reasons
    assert reason.startswith("weights-differ-from-masters: w: 12 of 12 values are not those of")
    assert reason.endswith("(--ignore weights-differ-from-masters counts it as good)")
    assert fates(pruned(tmp_path))["step-2"] == "keep"
    accepted = ckptool.verify_run(tmp_path, ignore=("weights-differ-from-masters",))
    assert accepted.steps[0].ok


def test_infinite_means_of_squares_do_not_matter(tmp_path: Path) -> None:
    state = {0: {"exp_avg": torch.ones(1), "exp_avg_sq": torch.tensor([float("inf")])}}
    optimizer = {"state": state, "param_groups": [{"lr": 1.0, "params": [0]}]}
    torch.save({"model": {"w": WEIGHT}, "optimizer": optimizer}, tmp_path / "step-1.pt")
    assert ckptool.verify_run(tmp_path).ok


def test_the_option_for_such_values_is_for_runs() -> None:
    told = CliRunner().invoke(app, ["verify", str(SOURCE), "--allow-nonfinite"])
    assert "--allow-nonfinite is for runs" in str(told.exception)


def linked_elsewhere(step: Path) -> None:
    step.rename(step.parent.parent / "moved")
    step.symlink_to("../moved")


Meanwhile = Callable[[Path], object]
CHANGES: dict[str, tuple[Meanwhile, str, set[str]]] = {
    "a kept step is cut": (
        lambda run: os.truncate(next((run / "step-3").glob("*.distcp")), 10),
        "was to be kept and was changed", {"step-2", "step-3"},
    ),
    "a kept step loses a file": (
        lambda run: next((run / "step-3").glob("*.distcp")).unlink(),
        "was to be kept and was changed", {"step-2", "step-3"},
    ),
    "a kept step is gone": (
        lambda run: shutil.rmtree(run / "step-3"), "was to be kept and is gone", {"step-2"},
    ),
    "the next is named": (
        lambda run: (run / "best.json").write_text('{"best": "step-2"}'), "",
        {"best.json", "step-2", "step-3"},
    ),
    "the next is linked": (
        lambda run: (run / "best").symlink_to("step-2"), "", {"best", "step-2", "step-3"},
    ),
    "the next is written": (
        lambda run: (run / "step-2" / "new.bin").write_bytes(b"x"), "", {"step-2", "step-3"},
    ),
    "the next is a link": (
        lambda run: linked_elsewhere(run / "step-2"), "", {"step-2", "step-3"},
    ),
    "the next gets a run": (
        lambda run: shutil.copytree(SOURCE, run / "step-2" / "sub" / "step-77"), "",
        {"step-2", "step-3"},
    ),
    "a pointer is cut off": (
        lambda run: (run / "latest").touch(), "ends early", {"latest", "step-2", "step-3"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_before_the_next_removal(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2", "step-3")
    work, error, left = CHANGES[change]
    after_each_removal(monkeypatch, lambda: work(run))
    if error:
        with pytest.raises((Changed, TransferError), match=error):
            pruned(run, yes=True, quick=True)
    else:
        assert fates(pruned(run, yes=True, quick=True))["step-2"] == "keep"
    assert {path.name for path in run.iterdir()} == left


def test_what_cannot_be_removed_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steps(tmp_path / "run", "step-1", "step-2", "step-3", "step-4")
    real = removal._delete

    def refuse(path: Path) -> None:
        if "step-2" in path.name and path.exists():
            raise PermissionError(13, "Permission denied", str(path))
        real(path)

    monkeypatch.setattr(removal, "_delete", refuse)
    with pytest.raises(TransferError, match=r"step-2: cannot be removed: Permission denied"):
        pruned(run, yes=True, quick=True)
    assert names_in(run) == [".step-2.ckptool-removed", "step-4"]
    steps(run, "step-5")
    ran = CliRunner().invoke(app, ["prune", str(run), "--keep-last", "1", "--quick", "--yes"])
    assert ran.exit_code == 0
    assert names_in(run) == [".step-2.ckptool-removed", "step-5"]
    assert "left" in ran.stdout
    assert ".step-2.ckptool-removed" in ran.stdout
    told = pruned(run, yes=True, quick=True).to_dict()
    assert "Permission denied" in told["stuck"][0]["problem"]


def test_half_saved_steps_are_left_with_the_reason(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["accelerate"])
    write_step(run, TRAINERS["accelerate"], 4, 4)
    assert reasons(run)["checkpoint_4"] == (
        "not good: random_states_1 is missing; every earlier whole step has it"
    )
    ran = CliRunner().invoke(app, ["verify", str(run), "--latest-good", "--quick"])
    assert "random_states_1 is missing" in ran.stderr


def test_all_verifies_half_saved_steps_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"])
    write_step(run, TRAINERS["transformers"], 4, 5)
    report = ckptool.verify_run(run, every=True)
    assert [(step.number, step.ok, len(step.reports)) for step in report.steps] == [
        (4, False, 1), (3, True, 1), (2, True, 1), (1, True, 1)
    ]  # fmt: skip


def test_a_run_of_fewer_ranks_is_whole(tmp_path: Path) -> None:
    """The names of the other files say how many ranks wrote the step."""
    run = tmp_path / "run"
    for step, ranks in ((1, 4), (2, 2)):
        at = run / f"step-{step}"
        at.mkdir(parents=True)
        for rank in range(ranks):
            torch.save({"r": rank}, at / f"rng_state_{rank}.pth")
            name = f"model_world_size_{ranks}_rank_{rank}.pt"
            torch.save({"w": WEIGHT}, at / name)
    complete = {step.path.name: step.reasons for step in ckptool.list_steps(run).steps}
    assert not any("rng_state" in reason for reason in complete["step-2"])
    (run / "step-2" / "rng_state_1.pth").unlink()
    again = {step.path.name: step.reasons for step in ckptool.list_steps(run).steps}
    assert any("rng_state_1" in reason for reason in again["step-2"])


def test_other_files_that_come_later_do_not_count(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"])
    for step in (1, 2):
        for name in ("eval_results.json", "notes.txt", "events.out.tfevents.17", "plot.png"):
            (run / f"checkpoint-{step}" / name).write_text("x")
    latest = ckptool.verify_run(run, quick=True).latest_good
    assert latest is not None
    assert latest.path.name == "checkpoint-3"


def remote() -> RemotePath:
    run = location(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(run, RemotePath)
    return run


def test_steps_of_a_store_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = remote()
    for step in (1, 2, 3):
        for file in SOURCE.iterdir():
            (run / f"step-{step}" / file.name).write_bytes(file.read_bytes())
    pointer = json.dumps({"step": "step-2"}).encode()
    after_each_removal(monkeypatch, lambda: (run / "latest.json").write_bytes(pointer))
    report = prune(location(str(run)), PruneOptions(keep_last=1, yes=True))
    assert fates(report) == {"step-3": "keep", "step-2": "keep", "step-1": "remove"}
    before = hashes(SOURCE)
    assert {name.partition("/")[0] for name in run.afresh().listing} == {
        "latest.json", "step-2", "step-3"
    }  # fmt: skip
    assert hashes(SOURCE) == before


def test_a_half_saved_step_of_a_store_is_not_good(tmp_path: Path) -> None:
    local, run = run_of(tmp_path, TRAINERS["transformers"]), remote()
    write_step(local, TRAINERS["transformers"], 4, 5)
    for file in (path for path in local.rglob("*") if path.is_file()):
        (run / str(file.relative_to(local))).write_bytes(file.read_bytes())
    latest = ckptool.verify_run(str(run), quick=True).latest_good
    assert latest is not None
    assert latest.path.name == "checkpoint-3"
    ckptool.prune(str(run), keep_last=1, yes=True, quick=True)
    assert {name.partition("/")[0] for name in run.listing} == {"checkpoint-3", "checkpoint-4"}


def test_a_number_that_is_recorded_but_not_called_a_step_stays(tmp_path: Path) -> None:
    """As RSL-RL saves."""
    for step in (3, 6, 9):
        torch.save({"model": {"w": torch.ones(2)}, "iter": step}, tmp_path / f"model_{step}.pt")
    report = pruned(tmp_path, keep_last=1)
    why = "its name does not say that its number is a step"
    assert {(step.fate, step.reason) for step in report.steps} == {("keep", why)}


def test_steps_that_stay_by_their_names_are_not_said_to_be_bad(tmp_path: Path) -> None:
    """As Lingua saves: none of them is verified."""
    run = steps(tmp_path / "run", "0000000010", "0000000020")
    result = CliRunner().invoke(app, ["prune", str(run), "--keep-last", "1"])
    assert result.stdout.endswith("\nnothing to remove; no step was verified\n")
