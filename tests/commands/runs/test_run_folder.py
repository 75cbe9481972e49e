"""verify over a run's folder: the newest good step, and why newer ones are skipped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beginning import AtTheBeginning
from conftest import case
from recipes.damage import DAMAGE
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands import detect as detect_checkpoint
from ckptool.commands.inspect.steps import list_steps
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs import assessment, search
from ckptool.commands.runs.order import open_run
from ckptool.commands.runs.steps import Step
from ckptool.commands.runs.verify import RunReport, verify_run
from ckptool.commands.verify.verification import examine
from ckptool.errors import (
    Changed,
    CkptoolError,
    NoAnswer,
    NotFound,
    Unrecognized,
    Unsupported,
    UsageError,
)


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


def steps_of(run: Path) -> list[Step]:
    return list(open_run(run).steps)


def latest(run: Path) -> str | None:
    found = verify_run(run, VerifyOptions(), every=False).latest_good
    return None if found is None else str(found.path).removeprefix(f"{run}/")


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
    steps = [str(step.path).removeprefix(f"{run}/") for step in steps_of(run)]
    assert steps == [name.removesuffix("/actor") for name in names]
    assert latest(run) == steps[-1]


@pytest.mark.parametrize("name", [n for n, one in DAMAGE.items() if one.source == "dcp_base"
                                  and one.answer == "Damaged" and not one.conversion])  # fmt: skip
def test_a_damaged_step_is_skipped(name: str, tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1", "step-2", "step-3")
    DAMAGE[name].apply(run / "step-3")
    report = verify_run(run, VerifyOptions(), every=False)
    assert report.latest_good is not None
    assert report.latest_good.path == run / "step-2"
    assert [bool(one.reasons) for one in report.steps] == [True, False]


def one_empty_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "x.pt").touch()


EMPTY: dict[str, Callable[[Path], object]] = {
    "an empty folder": lambda run: (run / "step-3").mkdir(),
    "an empty file in a folder": lambda run: one_empty_file(run / "step-3"),
    "data without metadata": lambda run: (saved(run, "step-3") / "step-3" / ".metadata").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("state", EMPTY)
def test_a_save_that_was_only_begun_is_skipped(state: str, tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1", "step-2")
    EMPTY[state](run)
    assert latest(run) == "step-2"
    newest = checked(run).steps[0]
    assert newest.path.name == "step-3"
    assert newest.reasons


def test_an_empty_file_among_files_is_skipped(tmp_path: Path) -> None:
    run = saved(tmp_path, "step=1.ckpt", "step=2.ckpt")
    (run / "step=3.ckpt").touch()
    assert latest(run) == "step=2.ckpt"
    assert len(checked(run).steps) == 3


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


def test_files_that_are_one_a_step_are_not_ranks(tmp_path: Path) -> None:
    run = saved(tmp_path, "checkpoint_100.pt", "checkpoint_200.pt")
    assert [step.number for step in steps_of(run)] == [100, 200]


def test_the_bits_of_an_element_type_are_not_step(tmp_path: Path) -> None:
    wanted = {
        "model.fp16.pt": None, "model.pt": None, "model_2000-bf16.pt": 2000, "point500.pt": 500,
        "w_fp8_e4m3fn.pt": None, "model-q4_0.safetensors": None, "model-Q5_K_M.safetensors": None,
        "m-iq2_xxs.pt": None, "m_7-q8_0.pt": 7, "gptq_model-4bit-128g.safetensors": None,
        "w4a16.pt": None, "m-mxfp4.pt": None, "model-8-bit.pt": None, "q7.pt": None, "seq7.pt": 7,
        "q8_1000.pt": 1000, "checkpoint-4bit-300.pt": 300, "step_8bit.pt": None,
        "iter_0000100.pt": 100, "4-bit-step-9.pt": 9,
    }  # fmt: skip
    numbers = {step.path.name: step.number for step in steps_of(saved(tmp_path, *wanted))}
    assert numbers == wanted


def test_none_is_whole(tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1")
    (run / "step-1" / ".metadata").unlink()
    assert latest(run) is None
    result = CliRunner().invoke(app, ["verify", str(run), "--latest-good"])
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_link_to_nothing_is_no_good_step(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("moved.pt")
    report = verify_run(tmp_path, VerifyOptions(), every=True)
    assert [(step.path.name, step.ok) for step in report.steps] == [("model.pt", False)]
    result = CliRunner().invoke(app, ["verify", str(tmp_path), "--all"])
    assert result.exit_code == 1
    assert "link to moved.pt: no such file or folder" in result.stdout


def test_a_link_to_no_folder_is_no_good_step(tmp_path: Path) -> None:
    run = saved(tmp_path, "step-1")
    (run / "step-2").symlink_to("moved")
    report = verify_run(run, VerifyOptions(), every=True)
    (why,) = report.steps[0].reasons
    assert "step-2: link to moved: no such file or folder" in why


def test_no_step_is_left_to_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path, "step-1")
    scan = examine

    def removing(part: Any, options: Any) -> Any:
        shutil.rmtree(run / "step-1", ignore_errors=True)
        return scan(part, options)

    monkeypatch.setattr(assessment, "examine", removing)
    report = verify_run(run, VerifyOptions(), every=True)
    assert (report.steps, report.total, report.ok) == ((), 1, False)


def test_where_nothing_is_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unrecognized, match="the folder is empty"):
        steps_of(tmp_path)
    (tmp_path / "step-1").symlink_to("nowhere")
    with pytest.raises(Unrecognized, match="no file in it; step-1: a link to nothing"):
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
    assert [one["ok"] for one in content["steps"]] == [False, True]
    assert "1 of 2 steps" in CliRunner().invoke(app, ["verify", str(run), "--all"]).stdout


def test_errors_of_a_good_step_that_are_ignored_are_shown(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", "step-1")
    with open(run / "step-1" / "__1_0.distcp", "r+b") as file:
        file.truncate(600)
    for mode, stream in (("--latest-good", "stderr"), ("--all", "stdout")):
        words = ["verify", str(run), mode, "--ignore", "file-truncated"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
        assert "1 error ignored: file-truncated (__1_0.distcp)" in getattr(result, stream)


def unreadable(at: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails where a file below a folder is opened, looked at or listed."""
    for name in ("open", "stat", "scandir"):
        real = getattr(os, name)

        def failing(path: Any, *rest: Any, real: Any = real, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and str(path).startswith(str(at)):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize(
    ("names", "at"),
    [
        (("step-1", "step-2"), "step-2"),
        (("step-1", "step-2"), "step-2/.metadata"),
        (("step-1", "step-2"), "step-2/__1_0.distcp"),
        (("step-1.pt", "step-2.pt"), "step-2.pt"),
        (("step-1/actor", "step-1/critic", "step-2/actor", "step-2/critic"), "step-2/critic"),
    ],
)
def test_a_step_that_cannot_be_read_is_skipped(
    names: tuple[str, ...],
    at: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = saved(tmp_path, *names)
    unreadable(run / at, number, monkeypatch)
    assert str(latest(run)).startswith("step-1")


STEPS = ("step-1", "step-2", "step-3")


@pytest.mark.parametrize(
    "kind", [Unsupported, UsageError, Changed, NotFound, CkptoolError, OSError]
)
def test_no_error_of_one_step_ends_the_answer(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path, *STEPS)

    def failing(part: Path, options: VerifyOptions) -> Any:
        if part.name == "step-3":
            raise kind("more than can be done")
        return examine(part, options)

    monkeypatch.setattr(assessment, "examine", failing)
    assert latest(run) == "step-2"
    report = checked(run)
    assert [one.ok for one in report.steps] == [False, True, True]
    assert report.steps[0].reasons == ("more than can be done",)


def test_a_store_that_gives_no_answer_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(part: Path, options: VerifyOptions) -> Any:
        raise NoAnswer("no answer")

    monkeypatch.setattr(assessment, "examine", failing)
    with pytest.raises(NoAnswer):
        latest(saved(tmp_path, *STEPS))


@pytest.mark.parametrize(
    "options", [VerifyOptions(ignore=("bogus",)), VerifyOptions(ReadOptions(from_format="bogus"))]
)
def test_options_that_make_no_sense_are_not_a_fault_of_a_step(
    options: VerifyOptions, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"no such|unknown format"):
        verify_run(saved(tmp_path, *STEPS), options, every=True)


@pytest.mark.parametrize("command", [list_steps, open_run])
def test_no_run_is_of_an_unknown_format(command: Callable[..., object], tmp_path: Path) -> None:
    run = saved(tmp_path, "step_1.pt", "step_2.pt")
    with pytest.raises(UsageError, match="unknown format"):
        command(run, ReadOptions("nothing"))


@pytest.mark.parametrize("point", ["listed", "detected", "verified"])
@pytest.mark.parametrize("gone", [".metadata", "__0_0.distcp", ""])
def test_steps_that_rotate(
    gone: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest step goes, whole or in part, after it was seen."""
    run = saved(tmp_path, *STEPS)

    def rotate() -> None:
        if gone:
            (run / "step-3" / gone).unlink(missing_ok=True)
        else:
            shutil.rmtree(run / "step-3", ignore_errors=True)

    module, name = {
        "listed": (search, "folder_at"),
        "detected": (detect_checkpoint, "detect"),
        "verified": (assessment, "examine"),
    }[point]
    real = getattr(module, name)

    def rotating(*arguments: Any) -> Any:
        if point == "listed":
            found = real(*arguments)
            rotate()
            return found
        rotate()
        return real(*arguments)

    monkeypatch.setattr(module, name, rotating)
    assert latest(run) == "step-2"
    report = checked(run)
    assert {one.path.name for one in report.steps if one.ok} == {"step-1", "step-2"}
    assert len(report.steps) == (3 if gone else 2)


def test_a_step_that_is_saved_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path, *STEPS)
    scan = examine

    def writing(part: Any, options: Any) -> Any:
        def save() -> None:
            if part.name == "step-3":
                file = run / "step-3" / "__0_0.distcp"
                file.write_bytes(file.read_bytes())

        return scan(part, options, AtTheBeginning(save))

    monkeypatch.setattr(assessment, "examine", writing)
    assert latest(run) == "step-2"


def test_the_form_of_the_readme_is_safe_in_a_shell(tmp_path: Path) -> None:
    """Where no step is whole the trainer is not started, and not given an empty path."""
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    line = next(one for one in readme.splitlines() if "--latest-good)" in one)
    line = line.partition("run: ")[2].replace("runs/", "run")
    tools = tmp_path / "bin"
    tools.mkdir()
    script = f'#!/bin/sh\nexec {sys.executable} -m ckptool "$@"\n'
    for name, text in {"ckptool": script, "torchrun": '#!/bin/sh\necho "started $*"\n'}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def ran() -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    run = saved(tmp_path / "run", "step-1")
    assert ran() == (0, "started ... --resume run/step-1\n")
    (run / "step-1" / ".metadata").write_bytes(b"")
    assert ran() == (1, "")
    shutil.rmtree(run)
    assert ran() == (3, "")


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(NotFound, match="no such file or folder") as missing:
        verify_run(tmp_path / "runn", VerifyOptions(), every=False)
    assert missing.value.hint == f"did you mean {tmp_path / 'run'}?"
    (tmp_path / "file.pt").touch()
    with pytest.raises(Unrecognized, match="is a file, not a folder"):
        verify_run(tmp_path / "file.pt", VerifyOptions(), every=True)
