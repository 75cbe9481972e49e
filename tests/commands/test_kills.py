"""Processes that are killed or interrupted: the target is complete or absent, and resumed."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Bits, read_back
from layered import save

from ckptool.cli import _run
from ckptool.commands import convert
from ckptool.commands.open import open_checkpoint

KILLS = 12


SLOW = ("--workers", "1")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough (about 100 MB) that a signal finds the command at work."""
    return save(tmp_path_factory.mktemp("large") / "ckpt", 25, 2048)


@pytest.fixture(scope="module")
def truth(large: Path) -> dict[str, Bits]:
    return read_back("dcp", large)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", 6, 96)


COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reshard": ("r", "dcp", ("--mesh", "2x2")),
    "convert to a folder": ("r", "dcp", ("--to", "dcp")),
    "convert to a file": ("r.pt", "torch-save", ("--to", "torch-save")),
}
"""Target's name, its format, and the options of a command."""


def start(kind: str, source: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    name, _, words = COMMANDS[kind]
    line = [sys.executable, "-m", "ckptool", kind.split()[0], str(source), str(folder / name)]
    return subprocess.Popen(
        [*line, *words, *SLOW, "-q", *more], stderr=subprocess.PIPE, text=True, cwd=folder
    )


def finish(kind: str, source: Path, folder: Path, *more: str) -> tuple[int, str]:
    process = start(kind, source, folder, *more)
    _, words = process.communicate(timeout=60)
    return process.returncode, words


def has_partial(folder: Path) -> bool:
    return any(path.name.endswith(".partial") for path in folder.iterdir())


def wait_for_partial(process: subprocess.Popen[str], folder: Path) -> None:
    while process.poll() is None and not has_partial(folder):
        time.sleep(0.002)


def killed(process: subprocess.Popen[str], after: float) -> bool:
    """Whether the process was killed, and not done before."""
    try:
        process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return process.returncode == -signal.SIGKILL


def seconds_at_work(kind: str, source: Path, folder: Path) -> float:
    """How long a whole run takes from the moment it begins to write."""
    process = start(kind, source, folder)
    wait_for_partial(process, folder)
    begin = time.perf_counter()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 0, words
    return time.perf_counter() - begin


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def assert_whole_or_not_there(kind: str, folder: Path, truth: dict[str, Bits]) -> bool:
    """Whether the target is there. What opens as a checkpoint must be all of it."""
    name, target, _ = COMMANDS[kind]
    if not (folder / name).exists():
        return False
    open_checkpoint(folder / name)
    assert read_back(target, folder / name) == truth
    return True


@pytest.mark.parametrize("kind", COMMANDS)
def test_killed_at_any_moment(
    kind: str, large: Path, truth: dict[str, Bits], tmp_path: Path
) -> None:
    """Over and over, a resumed run too; now and then one is left to end."""
    moments, name = random.Random(kind), COMMANDS[kind][0]
    longest = seconds_at_work(kind, large, tmp_path)
    remove(tmp_path / name)
    found_at_work = 0
    for _ in range(KILLS):
        again = "--resume" if has_partial(tmp_path) else "--overwrite"
        process = start(kind, large, tmp_path, again)
        wait_for_partial(process, tmp_path)
        if killed(process, moments.uniform(0, longest)):
            found_at_work += has_partial(tmp_path)
        if assert_whole_or_not_there(kind, tmp_path, truth):
            remove(tmp_path / name)
    assert found_at_work
    more = ("--resume",) if has_partial(tmp_path) else ()
    code, words = finish(kind, large, tmp_path, *more)
    assert code == 0, words
    assert assert_whole_or_not_there(kind, tmp_path, truth)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", ["reshard", "convert to a file"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(
    kind: str, number: int, code: int, large: Path, truth: dict[str, Bits], tmp_path: Path
) -> None:
    process = start(kind, large, tmp_path)
    wait_for_partial(process, tmp_path)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == code, words
    assert "Traceback" not in words
    assert ("--resume" in words) is has_partial(tmp_path)
    assert not (tmp_path / COMMANDS[kind][0]).exists()
    again = ("--resume",) if has_partial(tmp_path) else ()
    done, words = finish(kind, large, tmp_path, *again)
    assert done == 0, words
    assert assert_whole_or_not_there(kind, tmp_path, truth)
    assert [path.name for path in tmp_path.iterdir()] == [COMMANDS[kind][0]]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(143)])
def test_interrupted_before_anything_is_begun(
    ending: BaseException,
    source: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: Any, **more: Any) -> Any:
        raise ending

    monkeypatch.setattr(convert, "prepare", interrupted)
    command = ["ckptool", "convert", str(source), str(out / "m"), "--to", "safetensors"]
    monkeypatch.setattr(sys, "argv", command)
    assert _run() in (130, 143)
    assert capsys.readouterr().err == "interrupted\n"
    assert not list(out.iterdir())
