"""convert over a run's folder: each good step under its own name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Ended, run_command
from pruned_runs import run_of
from recipes.damage import DAMAGE

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.engine.write import stage


def convert(run: Path, *words: str, code: int = 0) -> Ended:
    done = run_command("convert", run, run.parent / "out", *words)
    assert done.code == code, (done.stdout, done.stderr)
    return done


def states(run: Path, *words: str, code: int = 0) -> dict[str, str]:
    """What becomes of each step, newest first."""
    report = json.loads(convert(run, *words, "--json", code=code).stdout)
    return {Path(step["path"]).name: step["state"] for step in report["steps"]}


def test_each_good_step_is_converted_under_its_own_name(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200, 300)
    (run / "step-200" / ".metadata").unlink()
    done = convert(run, "--all-steps", "--to", "hf", "--model-only")
    assert "OK: 2 written, 1 not good" in done.stdout
    assert "there is no .metadata" in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step-100", "step-300"]
    assert open_checkpoint(tmp_path / "out" / "step-300").format.name == "hf"
    same = ("--against", tmp_path / "out" / "step-300", "--model-only")
    assert run_command("verify", run / "step-300", *same).code == 0


def test_what_is_there_and_equal_is_skipped(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200)
    convert(run, "--last", "1", "--to", "dcp")
    assert states(run, "--all-steps", "--to", "dcp") == {"step-200": "equal", "step-100": "written"}
    DAMAGE["data_flipped"].apply(tmp_path / "out" / "step-100")
    again = convert(run, "--all-steps", "--to", "dcp", code=1).stdout
    assert "there already, and" in again
    assert "FAILED: 1 equal, 1 failed" in again
    replaced = states(run, "--all-steps", "--to", "dcp", "--overwrite")
    assert replaced == {"step-200": "equal", "step-100": "written"}


def test_some_of_the_steps_are_converted(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200, 250, 300)
    DAMAGE["data_flipped"].apply(run / "step-300")
    last = states(run, "--last", "1")
    assert last == {"step-300": "not good", "step-250": "written"}
    assert states(run, "--every", "200") == {"step-200": "written"}
    planned = states(run, "--every", "100", "--dry-run")
    assert planned == {"step-300": "planned", "step-200": "planned", "step-100": "planned"}
    assert not (tmp_path / "out" / "step-100").exists()
    said = convert(run, "--every", "7", code=2).stderr
    assert "no step of" in said
    assert "100, 200, 250, 300" in said


def test_a_step_is_good_if_verify_calls_it_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number, value in ((1, 1.0), (2, float("nan"))):
        torch.save({"model": {"w": torch.tensor([value])}}, run / f"step-{number}.pt")
    found = convert(run, "--all-steps")
    assert "not-finite: model.w: 1 NaN" in found.stdout
    assert not (tmp_path / "out" / "step-2.pt").exists()
    accepted = states(run, "--all-steps", "--allow-nonfinite")
    assert accepted == {"step-2.pt": "written", "step-1.pt": "equal"}
    assert states(run, "--last", "1", "--ignore", "not-finite") == {"step-2.pt": "equal"}
    planned = convert(run, "--all-steps", "--dry-run")
    assert "a dry run judges steps by their metadata" in planned.stderr
    assert "2 planned" in planned.stdout
    assert "--all-steps, --last N or --every K" in convert(run, "--allow-nonfinite", code=2).stderr


def test_notes_come_once_and_before_what_they_are_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200)
    said = convert(run, "--all-steps", "--to", "hf").stderr.splitlines()
    notes = [at for at, line in enumerate(said) if line.startswith("note: ")]
    assert notes == [*range(1, 1 + len(notes))]
    assert said[0].startswith("verifying")
    assert said[1 + len(notes)].startswith("writing")


def test_a_step_that_lacks_what_is_named_does_not_hide_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path, 200)
    torch.save({"v": torch.ones(3)}, run / "step-100.pt")
    torch.save({"v": torch.ones(3), "w": torch.ones(3)}, run / "step-300.pt")
    done = convert(run, "--all-steps", "--to", "dcp", "--drop", "w", code=1)
    assert "FAILED: 2 written, 1 failed" in done.stdout
    assert "--drop 'w' matches none" in done.stdout
    torch.save({"v": torch.ones(3)}, run / "step-300.pt")
    said = convert(run, "--all-steps", "--to", "dcp", "--drop", "w", code=2).stderr
    assert "so it is in" in said


def test_an_interrupted_step_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, 100, 200)

    def interrupt(self: stage.Stage) -> None:
        if self.target.path.name == "step-100":
            raise KeyboardInterrupt
        commit(self)

    commit = stage.Stage.commit
    monkeypatch.setattr(stage.Stage, "commit", interrupt)
    said = convert(run, "--all-steps", code=130).stderr
    assert "the same command with --resume continues" in said
    monkeypatch.undo()
    kept = [path.name for path in (tmp_path / "out").iterdir()]
    assert len(kept) > 1
    resumed = states(run, "--all-steps", "--resume")
    assert resumed == {"step-200": "equal", "step-100": "written"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step-100", "step-200"]


def test_files_and_parts_keep_their_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in (1, 2):
        torch.save({"w": torch.ones(3) * number}, run / f"model_step{number}.ckpt")
        torch.save({"state": torch.ones(3)}, run / f"opt_step{number}.ckpt")
    convert(run, "--all-steps")
    convert(run, "--all-steps", "--to", "torch-save")
    convert(run, "--all-steps", "--to", "dcp")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    stems = {f"{part}_step{number}" for part in ("model", "opt") for number in (1, 2)}
    assert written == {f"{stem}{end}" for stem in stems for end in ("", ".ckpt", ".pt")}


def test_what_one_checkpoint_has_no_use_for_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200)
    assert "one at a time" in convert(run, "--last", "1", "--every", "2", code=2).stderr
    assert "--part" in convert(run, "--all-steps", "--part", "1/2", code=2).stderr
    assert "is one checkpoint" in convert(run / "step-100", "--all-steps", code=4).stderr
    assert "--all-steps converts each step" in convert(run, code=3).stderr
    asked = convert(run, "--all-steps", "--select", "nothing", code=2).stderr
    assert f"so it is in {run}/step-200" in asked


def test_a_run_goes_into_no_file(tmp_path: Path) -> None:
    run, target = run_of(tmp_path, 100, 200), tmp_path / "model.safetensors"
    done = run_command("convert", run, target, "--last", "2")
    assert done.code == 2
    assert "the name of a .safetensors file, but several steps go into a folder" in done.stderr
    assert not target.exists()


def test_python_converts_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200)
    report = ckptool.convert_run(run, tmp_path / "out", last=1, to="hf", model_only=True)
    assert report
    assert [step.state for step in report.steps] == ["written"]
    shutil.rmtree(run / "step-200")
    assert len(ckptool.convert_run(run, tmp_path / "out", to="hf").steps) == 1
