"""The task of the ranks, and the process that keeps them: how it is started, heard and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from ckptool.commands.bench.isolated import isolated
from ckptool.commands.bench.processes import last_line
from ckptool.commands.bench.report import Settings
from ckptool.commands.bench.save_folders import SaveFolder
from ckptool.commands.bench.scratch import Folders
from ckptool.commands.bench.specs import TensorSpec, total
from ckptool.errors import TransferError

_LEAST_TIMEOUT = 240.0
_SLOWEST = 10e6
"""Assumed minimum of bytes written per second before anything is measured."""

_SLACK = 20
"""How many times as long as a raw write a save may take."""

_POLL_EVENTS = 0.1
_MOST_TIME_ENDING = 20.0
_PIECE = 1 << 16
_FATAL = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_KEEPER = "ckptool.commands.bench.worker.keeper"

Emit = Callable[[Mapping[str, Any]], None]
"""Called with events: ``event`` is begin, doing, measured, skipped, failed or limits."""


class Task(Struct):
    """The ranks' task. The folders are theirs alone.

    ``write_rate``: bytes per second that all ranks write together, if known.
    """

    settings: Settings
    specs: list[TensorSpec]
    strategies: list[str]
    folders: Folders
    write_rate: float = _SLOWEST * _SLACK

    @property
    def timeout(self) -> float:
        """Seconds after which a save, or a message between ranks, counts as hung."""
        return _LEAST_TIMEOUT + _SLACK * total(self.specs) / self.write_rate

    def folder(self, job: str) -> Path:
        """Return where a job of the ranks may write."""
        return self.folders.scratch / job.replace("/", "_")

    def saves(self, job: str) -> SaveFolder:
        """Return where a job of the ranks saves."""
        return self.folders.saves / job.replace("/", "_")

    def log(self, job: str, rank: int) -> Path:
        """Return the file for the output of a job's processes."""
        return Path(self.folders.temporary) / "logs" / f"{job.replace('/', '_')}-{rank}.log"


def launch(task: Task, emit: Emit) -> None:
    """Have a process of its own keep the ranks that do the task; none is left afterwards.

    What else the calling process runs is not touched. Raises TransferError if a rank fails,
    KeyboardInterrupt and SystemExit if this process is told to stop.
    """
    file, log = Path(task.folders.temporary) / "task", task.log("keeper", 0)
    file.write_bytes(msgspec.json.encode(task))
    reading, writing = os.pipe()
    with _unwind_on_signals(), open(log, "wb") as output, open(reading, "rb", 0) as events:
        try:
            keeper = subprocess.Popen(
                isolated(_KEEPER, str(file)),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=output,
                start_new_session=True,  # out of reach of a terminal's Ctrl-C
            )
        finally:
            os.close(writing)
        try:
            for line in _lines(events, keeper):
                emit(json.loads(line))
        finally:
            _end(keeper)
    if keeper.returncode:
        words = last_line(log) or f"its keeper ended with {keeper.returncode}"
        raise TransferError(f"a rank of the benchmark failed: {words}")


def _lines(events: FileIO, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield what a process prints until it ends, though what it started may hold the pipe still."""
    pending, ended = b"", False
    while not ended:
        ended = process.poll() is not None
        while wait([events.fileno()], 0 if ended else _POLL_EVENTS):
            piece = events.read(_PIECE)
            *lines, pending = (pending + piece).split(b"\n")
            yield from lines
            if not piece:
                process.wait()
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a process end what it keeps, and then itself; kill it if it does not."""
    try:
        process.terminate()
        process.wait(_MOST_TIME_ENDING)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


@contextmanager
def _unwind_on_signals() -> Iterator[None]:
    """Raise SystemExit for a signal that would end this process at once, without cleanup."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    fatal = [n for n in _FATAL if signal.getsignal(n) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        fatal = []  # Python sets handlers only in the main thread
    for number in fatal:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in fatal:
            signal.signal(number, signal.SIG_DFL)
