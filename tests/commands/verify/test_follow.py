"""verify --follow: each step of a run is checked once it is finished."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest
from conftest import Ended, case, run_command
from recipes.damage import DAMAGE

from ckptool.commands.verify import follow as module

SOURCE = case("dcp_base").path


def save(run: Path, number: int) -> Path:
    step = run / f"step-{number}"
    shutil.copytree(SOURCE, step)
    return step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run


Follow = Callable[..., Ended]


@pytest.fixture
def follow(run: Path, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Follow the run, and between two looks do the next thing, then end it by Ctrl-C."""

    def do(*things: Callable[[], object], words: tuple[object, ...] = (), code: int = 0) -> Ended:
        rest = chain(things, repeat(lambda: None, 3))

        def wait(seconds: float) -> None:
            thing = next(rest, None)
            if thing is None:
                raise KeyboardInterrupt
            thing()

        with monkeypatch.context() as patch:
            patch.setattr(module, "follow", partial(module.follow, wait=wait))
            done = run_command("verify", run, "--follow", *words)
        assert done.code == code, (done.stdout, done.stderr)
        return done

    return do


def test_each_step_is_checked_once_it_is_finished(run: Path, follow: Follow) -> None:
    done = follow(lambda: save(run, 1), lambda: None, lambda: save(run, 2))
    assert done.stdout.splitlines() == [f"OK     {run}/step-1", f"OK     {run}/step-2"]


def test_a_step_that_is_being_written_is_not_judged(run: Path, follow: Follow) -> None:
    save(run, 1)
    metadata = run / "step-2" / ".metadata"

    def begin() -> None:
        save(run, 2)
        metadata.rename(run / "kept")

    def finish() -> None:
        (run / "kept").rename(metadata)

    lines = follow(begin, *[lambda: None] * 4, finish).stdout.splitlines()
    assert lines == [f"OK     {run}/step-1", f"OK     {run}/step-2"]


def test_a_step_that_nobody_will_finish_has_failed(run: Path, follow: Follow) -> None:
    def kill() -> None:
        (save(run, 1) / ".metadata").unlink()

    done = follow(kill, *[lambda: None] * 4, lambda: save(run, 2), code=1)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"FAILED {run}/step-1  save-incomplete: ")
    assert second == f"OK     {run}/step-2"


def test_a_step_that_changes_is_checked_again(run: Path, follow: Follow) -> None:
    step = save(run, 1)
    waits = [lambda: None] * 3
    done = follow(*waits, lambda: DAMAGE["data_flipped"].apply(step), code=1)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["OK", "FAILED"]


def test_json_has_an_object_in_each_line(run: Path, follow: Follow) -> None:
    DAMAGE["data_flipped"].apply(save(run, 1))
    save(run, 2)
    lines = follow(words=("--json",), code=1).stdout.splitlines()
    reports = [json.loads(line) for line in lines]
    assert [(each["schema"], each["number"], each["ok"]) for each in reports] == [
        ("ckptool.verify-step/2", 1, False),
        ("ckptool.verify-step/2", 2, True),
    ]


def test_a_command_runs_for_each_good_step(run: Path, tmp_path: Path, follow: Follow) -> None:
    DAMAGE["data_flipped"].apply(save(run, 1))
    save(run, 2)
    follow(words=("--then", f"cp -r {{}} {tmp_path}/kept"), code=1)
    assert (tmp_path / "kept" / ".metadata").exists()
    shutil.rmtree(run / "step-1")
    done = follow(words=("--then", "sh -c 'exit 3' {}"), code=1)
    assert done.stdout == f"OK     {run}/step-2  the command ended with 3\n"
    ended = follow(words=("--json", "--then", "true {}"))
    assert json.loads(ended.stdout)["then"] == 0


def test_no_shell_reads_the_path_of_a_step(run: Path, tmp_path: Path, follow: Follow) -> None:
    shutil.copytree(SOURCE, run / "step-1; touch x $(touch y)")
    follow(words=("--then", "test -d {}"))
    follow(words=("--then", f"cp -r {{}} {tmp_path}/kept"))
    assert (tmp_path / "kept" / ".metadata").exists()
    assert not Path("x").exists()
    assert not Path("y").exists()


WRONG = (
    (("--follow", "--then", "echo"), "--then 'echo {}'"),
    (("--follow", "--then", "no-such-program {}"), "no such program"),
    (("--follow", "--then", "echo '{}"), "No closing quotation"),
    (("--then", "echo {}"), "it needs --follow"),
    (("--follow", "--all"), "one at a time"),
    (("--follow", "--format", "junit"), "--follow never has"),
)


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_what_cannot_be_followed_is_said_at_once(
    words: tuple[str, ...], said: str, run: Path
) -> None:
    done = run_command("verify", run, *words)
    assert done.code == 2
    assert said in done.stderr


def test_a_folder_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    assert run_command("verify", tmp_path / "none", "--follow").code == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_answer(number: signal.Signals, run: Path) -> None:
    words = [sys.executable, "-m", "ckptool", "verify", str(run), "--follow", "--then", "echo {}"]
    save(run, 1)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == f"{run}/step-1\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == 0
