"""Processes of a rank: how they end, and the memory they hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.commands.bench.processes import (
    command_line,
    descendants,
    orphans,
    proportional_memory,
    run_child,
)

MIB = 1 << 20


def test_descendants_and_the_memory_they_hold() -> None:
    line = "import time; held = bytearray(64 << 20); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", line], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = {item.pid: item for item in descendants()}
        assert "bytearray" in command_line(found[process.pid])
        assert 64 * MIB < proportional_memory([found[process.pid]]) < 200 * MIB
    finally:
        process.kill()
        process.wait()
    assert process.pid not in {item.pid for item in descendants()}


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {process.pid for process in descendants()}
    yield
    left = orphans(0.0)
    theirs = before.copy()  # the server of forks may work for another worker of pytest
    for pid in before:
        theirs |= {process.pid for process in descendants(pid)}
    left = [process for process in left if process.pid not in theirs]
    assert [command_line(process) for process in left if process.is_running()] == []


def test_a_process_returns_what_its_work_does(tmp_path: Path) -> None:
    assert run_child(lambda tell: {"pid": 1}, tmp_path / "log").value == {"pid": 1}


def _raise(tell: Any) -> None:
    raise ValueError("several words\nand the last")


def _die(tell: Any) -> None:
    os.write(2, b"dying words\n")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "reason"), [(_raise, "ValueError: and the last"), (_die, "dying words")]
)
def test_a_process_that_fails_says_why(work: Any, reason: str, tmp_path: Path) -> None:
    assert run_child(work, tmp_path / "log").failure == reason


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    ended = run_child(lambda tell: time.sleep(600), tmp_path / "log", timeout=0.2)
    assert (ended.failure or "").startswith("hung: no progress")


def test_a_process_is_ended_when_it_shall(tmp_path: Path) -> None:
    ended = run_child(lambda tell: time.sleep(600), tmp_path / "log", stop=lambda: "enough")
    assert ended.failure == "enough"


_MEMORY = """
import mmap
from pathlib import Path
from ckptool.commands.bench.processes import run_child

def pages():
    filled = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    filled.write(bytes(64 << 20))
    return filled

def train(tell):
    tell("training", None)
    first = pages()
    tell("checking", None)
    second = pages()

result = run_child(train, Path("log"), measure=True)
print(result.peak - result.base)
"""
"""In a small process: what a large one shares with its child counts half until either writes it."""


def test_memory_is_watched_from_the_first_step_to_the_check(tmp_path: Path) -> None:
    run = [sys.executable, "-c", _MEMORY]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert 60 * MIB < int(ended.stdout) < 100 * MIB
