"""Start the ranks with torch's elastic launcher, and collect the events of rank 0.

Their events are sorted into a report's parts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptool.commands.bench.fork_server import adopt_orphans, kill_descendants
from ckptool.commands.bench.report import Limits, Measured
from ckptool.commands.bench.specs import Task
from ckptool.errors import TransferError

_LOOK = 0.1

Emit = Callable[[dict[str, Any]], None]


def launch(task: Task, ranks: int, emit: Emit) -> None:
    """Run the task on ``ranks`` processes of this machine; nothing of them is left afterwards.

    TransferError where a rank ends otherwise than it should, KeyboardInterrupt and SystemExit
    where this process is asked to stop.
    """
    scratch = Path(task.scratch)
    task_file, events = scratch / "task.json", scratch / "events.jsonl"
    task.write(task_file)
    events.touch()
    adopt_orphans()
    try:
        with _forwarded(events, emit), _own_signals():
            _run_agent(ranks, scratch, [str(task_file), str(events)])
    finally:
        kill_descendants(os.getpid())


def _run_agent(ranks: int, scratch: Path, words: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = scratch / "agent"
    logs.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=scratch.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    line = (sys.executable, "-m", "ckptool.commands.bench", *words)
    logging.disable()  # the agent's own words on what it starts and stops
    try:
        elastic_launch(config, line[0])(*line[1:])
    except ChildFailedError:
        raise TransferError(f"a rank of the benchmark failed: {_last_words(logs)}") from None
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stop.sigval) from None
    finally:
        logging.disable(logging.NOTSET)


def _last_words(logs: Path) -> str:
    """The last line that any rank wrote to stderr."""
    for file in sorted(logs.rglob("stderr.log")):
        lines = file.read_text("utf-8", "replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it said nothing"


@contextmanager
def _own_signals() -> Iterator[None]:
    """The agent takes signals for itself; give them back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _forwarded(events: Path, emit: Emit) -> Iterator[None]:
    """Pass on what is appended to a file of JSON lines, to the last line."""
    over = threading.Event()
    with open(events, encoding="utf-8") as stream:
        listener = threading.Thread(target=_listen, args=(stream, over, emit))
        listener.start()
        try:
            yield
        finally:
            over.set()
            listener.join()


def _listen(stream: Any, over: threading.Event, emit: Emit) -> None:
    unfinished = ""
    while True:
        last = over.is_set()
        *lines, unfinished = (unfinished + stream.read()).split("\n")
        for line in lines:
            emit(json.loads(line))
        if last:
            return
        over.wait(_LOOK)


@dataclass(slots=True)
class WorkerEvents:
    """What rank 0 has reported so far."""

    limits: Limits = field(default_factory=dict)
    results: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Sort in one event."""
        kind = event["event"]
        if kind == "limits":
            self.limits = event["limits"] or {}
            if event["failure"]:
                self.failed["limits"] = event["failure"]
        elif kind == "measured":
            self.results.append(Measured.of_event(event))
        elif kind == "left-out":
            self.left_out[event["name"]] = event["reason"]
        elif kind == "failed":
            self.failed[event["name"]] = event["reason"]
