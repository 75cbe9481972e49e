"""Jobs that go on, and those that hang or whose workers die: what is said, and of which process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptool.commands.bench.processes import (
    ChildResult,
    run_child,
    with_descendants,
)
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.worker import pulse
from ckptool.commands.bench.worker.pulse import BESIDE, DONE, Pulse

LONG = 100.0


class Count:
    """What all ranks share; another rank may add to it."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, number: int) -> int:
        self.value += number
        return self.value


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look ten times a second, and at nothing of other tests, such as the server that forks."""
    others = {process.pid for process in psutil.Process().children()}

    def own() -> list[psutil.Process]:
        begun = [each for each in psutil.Process().children() if each.pid not in others]
        return [each for process in begun for each in with_descendants(process.pid)]

    monkeypatch.setattr(pulse, "descendants", own)
    monkeypatch.setattr(pulse, "_EVERY", 0.1)
    monkeypatch.setattr(pulse, "MOST_SILENT_AFTER_A_DEATH", 0.5)


def train(beside: Callable[[int], bool]) -> Callable[[Any], str]:
    """A process that trains beside a worker's save, which is done when ``beside`` says so."""

    def work(tell: Any) -> str:
        worker = subprocess.Popen(["sleep", "321"])
        tell(BESIDE, os.getpid())
        for step in count():
            sum(range(20_000))  # a step
            if beside(worker.pid) or step > 1_000_000:
                break
        tell(DONE, None)
        worker.kill()
        return "saved"

    return work


def run(work: Any, folder: Path, silent: float, shared: Any = None) -> ChildResult:
    """As a rank does."""
    looks = Pulse(folder, shared or Count(), silent)
    log, others = folder / "log", {process.pid for process in psutil.Process().children()}
    try:
        return run_child(work, log, stop=looks.problem, on_event=looks.hear, timeout=LONG)
    finally:
        for begun in psutil.Process().children():
            for process in with_descendants(begun.pid) if begun.pid not in others else ():
                process.kill()  # and nothing below others, such as what their server runs


def send(number: int) -> Callable[[int], bool]:
    """Send the worker a signal, once, and never be done."""
    sent: list[int] = []

    def beside(worker: int) -> bool:
        if not sent and os.path.exists(f"/proc/{worker}/exe"):
            time.sleep(0.3)  # it was seen
            os.kill(worker, number)
            sent.append(worker)
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG)
        return False

    return beside


def test_a_worker_that_dies_is_named_though_training_goes_on(tmp_path: Path) -> None:
    ended = run(train(send(signal.SIGKILL)), tmp_path, LONG)
    assert ended.failure == "a process of the save ended before it was saved: sleep 321"


@pytest.mark.parametrize(("word", "noticed"), [("save", True), (DONE, False)])
def test_a_worker_that_dies_while_training_waits_for_it_is_named(
    word: str, noticed: bool, tmp_path: Path
) -> None:
    """What ends after its save may take its time."""

    def wait(tell: Any) -> None:
        worker = subprocess.Popen(["sleep", "321"])
        tell(word, 0)
        time.sleep(0.5)
        worker.kill()
        time.sleep(600)

    reason = run(wait, tmp_path, 2.0).failure or ""
    died = "a process of the save ended before it was saved: sleep 321"
    assert reason == died if noticed else reason.startswith("hung: ")


def test_a_worker_that_is_stopped_is_named_though_training_goes_on(tmp_path: Path) -> None:
    ended = run(train(send(signal.SIGSTOP)), tmp_path, 1.0)
    assert ended.failure is not None
    assert ended.failure.startswith("hung: nothing happened for ")
    assert ended.failure.endswith("; a process is stopped: sleep 321")


def test_a_process_that_waits_for_ever_is_noticed(tmp_path: Path) -> None:
    ended = run(lambda tell: time.sleep(600), tmp_path, 1.0)
    assert (ended.failure or "").startswith("hung: nothing happened for ")


def test_what_waits_longer_for_a_worker_that_ends_as_it_should_is_not_ended(tmp_path: Path) -> None:
    """The library's own end of it takes a moment more."""
    begin = time.monotonic()
    ended = run(train(lambda worker: time.monotonic() - begin > 0.3), tmp_path, LONG)
    assert ended == ChildResult("saved")


def grow(folder: Path) -> Callable[[Any], str]:
    def work(tell: Any) -> str:
        tell(BESIDE, os.getpid())
        with (folder / "file").open("wb") as stream:
            for _ in range(20):
                stream.write(b"more")
                stream.flush()
                time.sleep(0.1)
        return "written"

    return work


def test_what_still_writes_goes_on_however_slowly(tmp_path: Path) -> None:
    assert run(grow(tmp_path), tmp_path, 1.0).value == "written"


def test_what_another_rank_does_counts(tmp_path: Path) -> None:
    def wait(tell: Any) -> str:
        time.sleep(2)
        return "met"

    beats = count()
    assert run(wait, tmp_path, 1.0, lambda number: next(beats)).value == "met"


def test_what_waits_for_the_disk_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_waits_for_disk", lambda process: True)

    def synchronize(tell: Any) -> str:
        time.sleep(2)
        return "synced"

    assert run(synchronize, tmp_path, 1.0).value == "synced"


def test_files_that_vanish_while_they_are_counted_are_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(folder: DiskFolder) -> dict[str, int]:
        raise FileNotFoundError(folder.disk)

    monkeypatch.setattr(DiskFolder, "sizes", vanished)
    assert Pulse(tmp_path, Count())._grows(tmp_path)


def test_the_state_of_a_thread_is_read_whatever_its_process_is_called() -> None:
    import psutil

    assert not pulse._waits_for_disk(psutil.Process())


def test_a_save_to_a_store_is_only_timed() -> None:
    looks = Pulse(None, Count(), 0.0)
    assert looks.problem() is None


def test_a_dead_process_is_noticed_though_what_it_started_holds_its_pipe(tmp_path: Path) -> None:
    later = tmp_path / "later"

    def die(tell: Any) -> None:
        if os.fork() == 0:
            time.sleep(3)
            later.touch()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    ended = run(die, tmp_path, LONG)
    assert ended.failure == "the process ended with exit code -9"
    assert not later.exists()
