"""Start the ranks by torch's elastic launcher with their task; how they agree while they run."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckptool.commands.bench.processes import adopt_orphans, end_descendants
from ckptool.commands.bench.specs import TensorSpec, total
from ckptool.errors import TransferError
from ckptool.storage.url import Location, location

_LEAST_TIMEOUT = 240.0
_SLOWEST = 10e6
"""Bytes a second that are written at least, as long as nobody has measured it."""

_SLACK = 20
"""How many times as long as a raw write a save may take."""

_MEETING_TIMEOUT = timedelta(hours=12)
_POLL_MEETING = 0.003
_POLL_EVENTS = 0.1

Emit = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the ranks are to do. ``scratch`` is theirs alone; ``temporary`` is their TMPDIR.

    ``store``: the URL that checkpoints are saved below; None to save them in ``scratch``.
    ``write_rate``: bytes a second that all ranks write together, where that is known.
    """

    specs: list[TensorSpec]
    strategies: list[str]
    saves: int
    abort: bool
    device_type: str
    scratch: str
    temporary: str
    store: str | None = None
    write_rate: float = _SLOWEST * _SLACK

    @staticmethod
    def read(path: Path) -> Task:
        """Read the task that ``write`` wrote."""
        fields = json.loads(path.read_text("utf-8"))
        specs = [
            TensorSpec(tuple(spec["path"]), tuple(spec["shape"]), spec["dtype"])
            for spec in fields["specs"]
        ]
        return Task(**{**fields, "specs": specs})

    def write(self, path: Path) -> None:
        """Write it for a process that is started with its path."""
        path.write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    @property
    def timeout(self) -> float:
        """Seconds that a save, or a talk of the ranks, may take before it counts as hung."""
        return _LEAST_TIMEOUT + _SLACK * total(self.specs) / self.write_rate

    def folder(self, job: str) -> Path:
        """Return where a job of the ranks may write."""
        return Path(self.scratch) / job.replace("/", "_")

    def place(self, job: str) -> Location:
        """Return where a job of the ranks saves."""
        if self.store is None:
            return self.folder(job)
        return location(self.store) / job.replace("/", "_")

    def log(self, job: str, rank: int) -> Path:
        """Return the file for what a job's processes print."""
        return Path(self.scratch) / "logs" / f"{job.replace('/', '_')}-{rank}.log"


class Meeting:
    """What the watching processes of all ranks say to one another, without a process group.

    A group would start threads, which no fork survives. They meet at the store that the elastic
    agent keeps; where there is none, rank 0 keeps it.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = self._connect(serve=not agent_serves and self.rank == 0)
        self._number = 0

    def _connect(self, *, serve: bool) -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, None, serve, timeout=_MEETING_TIMEOUT, wait_for_workers=False)
        return PrefixStore("ckptool-bench", store)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank passed, in the order of ranks; values that JSON holds."""
        self._number += 1
        keys = [f"gather-{self._number}-{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return [json.loads(self._await(key)) for key in keys]

    def _await(self, key: str) -> bytes:
        """Return what a key holds once it is there. The store's own waiting hears no signal."""
        while not self._has(key):
            time.sleep(_POLL_MEETING)
        value: bytes = self._store.get(key)
        return value

    def failing(self, job: str) -> Callable[[], str | None]:
        """Return a question: which other rank failed at this job?"""
        key = f"failed-{job}"
        return lambda: f"rank {self._store.get(key).decode()} failed" if self._has(key) else None

    def fail(self, job: str) -> None:
        """Let the others know that this rank failed at the job."""
        self._store.set(f"failed-{job}", str(self.rank))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def begin_group(self, job: str, backend: str, timeout: float) -> None:
        """Start, within a child, the process group of this job's processes.

        ``timeout``: seconds after which what its ranks say to one another fails.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(job, self._connect(serve=False))
        most = timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=most
        )


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
        with _forward_events(events, emit), _keep_signal_handlers():
            _run_agent(ranks, scratch, [str(task_file), str(events)])
    finally:
        end_descendants()


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
    """Return the last line that any rank wrote to stderr."""
    for file in sorted(logs.rglob("stderr.log")):
        lines = file.read_text("utf-8", "replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it printed nothing"


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Give signals back to their handlers: the agent takes them for itself."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _forward_events(events: Path, emit: Emit) -> Iterator[None]:
    """Pass on what is appended to a file of JSON lines, to the last line."""
    over = threading.Event()
    with open(events, encoding="utf-8") as stream:
        reader = threading.Thread(target=_read_events, args=(stream, over, emit))
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()


def _read_events(stream: Any, over: threading.Event, emit: Emit) -> None:
    unfinished = ""
    while True:
        last = over.is_set()
        *lines, unfinished = (unfinished + stream.read()).split("\n")
        for line in lines:
            emit(json.loads(line))
        if last:
            return
        over.wait(_POLL_EVENTS)
