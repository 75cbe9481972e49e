"""The process that keeps the ranks: all below it is the benchmark's, and ends with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from ckptool.commands.bench.launch import Task
from ckptool.commands.bench.meeting import LOOPBACK, Meeting, listen, serve_on
from ckptool.commands.bench.processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    last_line,
)
from ckptool.commands.bench.shared_memory import SharedMemory
from ckptool.commands.bench.worker.rank import import_torch, run_rank
from ckptool.engine.ranks import read_launch

_MOST_TIME_ENDING = 5.0


def main(file: str) -> None:
    """Do the task in ``file`` on ranks forked from this process, and print their events as JSON.

    Ends when the process that started this one does. At a rank's failure the last line of stderr
    says why.
    """
    signal.signal(signal.SIGTERM, _stop)
    die_with_parent(signal.SIGTERM)
    task = msgspec.json.decode(Path(file).read_bytes(), type=Task)
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # for what libraries print
    os.environ["TMPDIR"] = tempfile.tempdir = task.folders.temporary
    adopt_orphans()
    shared, ranks = SharedMemory(), dict[int, ForkProcess]()
    try:
        import_torch()
        _keep(task, events, ranks)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for process in ranks.values():
            process.terminate()
        for process in ranks.values():
            process.join(_MOST_TIME_ENDING)
        end_descendants(shared.look)
        shared.remove_left()


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _keep(task: Task, events: IO[str], ranks: dict[int, ForkProcess]) -> None:
    """Start ``ranks``, and wait until all have ended; SystemExit with the reason if one fails."""
    launched = read_launch(os.environ)
    if launched is not None:  # by torchrun, which has started the others
        ranks[launched.rank] = _start(task, events, launched.rank, {})
        store = None
    else:
        listening, size = listen(), task.settings.ranks
        port = listening.getsockname()[1]
        for rank in range(size):
            ranks[rank] = _start(task, events, rank, _environment(rank, size, port))
        store = serve_on(listening)  # after the forks, which its threads would not survive
    running = dict(ranks)
    while running:
        wait([process.sentinel for process in running.values()])
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
            if process.exitcode:
                raise SystemExit(last_line(task.log("rank", rank)) or "it printed nothing")
    del store


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for a rank."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in variables.items()}


def _start(task: Task, events: IO[str], rank: int, environment: Mapping[str, str]) -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(
        target=_be_rank, args=(task, events, rank, environment)
    )
    process.start()
    return process


def _be_rank(task: Task, events: IO[str], rank: int, environment: Mapping[str, str]) -> None:
    """Do the task as a rank, in its own process."""
    die_with_parent()
    os.environ.update(environment)
    output = os.open(task.log("rank", rank), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)

    def emit(event: Mapping[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    run_rank(task, Meeting(), emit)
