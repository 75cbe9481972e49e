"""The task of the ranks: how they are started, and how they agree while they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct, to_builtins

from ckptool.commands.bench.files import Folders
from ckptool.commands.bench.processes import adopt_orphans, end_descendants, last_line
from ckptool.commands.bench.report import Settings
from ckptool.commands.bench.specs import TensorSpec, total
from ckptool.errors import TransferError
from ckptool.storage.url import Location, location

_LEAST_TIMEOUT = 240.0
_SLOWEST = 10e6
"""Assumed minimum of bytes written per second before anything is measured."""

_SLACK = 20
"""How many times as long as a raw write a save may take."""

_MEETING_TIMEOUT = timedelta(hours=12)
_POLL_MEETING = 0.003
_POLL_EVENTS = 0.1
_HOST = "127.0.0.1"
_FATAL = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Emit = Callable[[dict[str, Any]], None]


class Task(Struct):
    """The ranks' task. ``folders.scratch`` is theirs alone.

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
        return Path(self.folders.scratch) / job.replace("/", "_")

    def place(self, job: str) -> Location:
        """Return where a job of the ranks saves."""
        if self.folders.store is None:
            return self.folder(job)
        return location(self.folders.store) / job.replace("/", "_")

    def log(self, job: str, rank: int) -> Path:
        """Return the file for the output of a job's processes."""
        return Path(self.folders.scratch) / "logs" / f"{job.replace('/', '_')}-{rank}.log"


class Meeting:
    """Messages between the watching processes of all ranks, without a process group.

    A group would start threads, which do not survive a fork. They meet at a store kept by the
    process that started them, or else by rank 0.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        starter_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = self._connect(serve=not starter_serves and self.rank == 0)
        self._number = self._events = 0

    def _connect(self, *, serve: bool) -> Any:
        return _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serve=serve)

    def read_task(self) -> Task:
        """Return the task that ``launch`` has for the ranks."""
        fields = json.loads(self._store.get("task"))
        specs = [
            TensorSpec(tuple(path), tuple(shape), dtype) for path, shape, dtype in fields["specs"]
        ]
        folders = Folders(*fields["folders"])
        return Task(Settings(**fields["settings"]), specs, fields["strategies"], folders)

    def emit(self, event: dict[str, Any]) -> None:
        """Report an event to ``launch``."""
        self._store.set(f"event-{self._events}", json.dumps(event))
        self._events += 1

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank passed, in rank order; values must be valid JSON."""
        self._number += 1
        keys = [f"gather-{self._number}-{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return [json.loads(self._await(key)) for key in keys]

    def _await(self, key: str) -> bytes:
        """Return the value of a key once it exists. The store's own wait ignores signals."""
        while not self._has(key):
            time.sleep(_POLL_MEETING)
        value: bytes = self._store.get(key)
        return value

    def failing(self, job: str) -> Callable[[], str | None]:
        """Return a function that returns another rank that failed at this job, if any."""
        key = f"failed-{job}"
        return lambda: f"rank {self._store.get(key).decode()} failed" if self._has(key) else None

    def fail(self, job: str) -> None:
        """Tell the others that this rank failed at the job."""
        self._store.set(f"failed-{job}", str(self.rank))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def begin_group(self, job: str, backend: str, timeout: float) -> None:
        """Start, within a child, the process group of this job's processes.

        ``timeout``: seconds after which communication of its ranks fails.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(job, self._connect(serve=False))
        most = timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=most
        )


def _connect(host: str, port: int, *, serve: bool) -> Any:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(host, port, None, serve, timeout=_MEETING_TIMEOUT, wait_for_workers=False)
    return PrefixStore("ckptool-bench", store)


def launch(task: Task, emit: Emit) -> None:
    """Run the task on ranks that are processes of this machine; none is left afterwards.

    Raises TransferError if a rank fails, KeyboardInterrupt and SystemExit if this process is told
    to stop.
    """
    store = _connect(_HOST, 0, serve=True)  # at a port that is free
    store.set("task", json.dumps(to_builtins(task)))
    ranks = task.settings.ranks
    logs = [task.log("rank", rank) for rank in range(ranks)]
    adopt_orphans()
    events = 0
    try:
        with _unwind_on_signals():
            port = store.underlying_store.port
            processes = [_start_rank(rank, ranks, port, log) for rank, log in enumerate(logs)]
            codes: list[int | None] = [None]
            while None in codes:
                time.sleep(_POLL_EVENTS)
                codes = [process.poll() for process in processes]
                while store.check([f"event-{events}"]):
                    emit(json.loads(store.get(f"event-{events}")))
                    events += 1
                for code, log in zip(codes, logs, strict=True):
                    if code:
                        words = last_line(log) or "it printed nothing"
                        raise TransferError(f"a rank of the benchmark failed: {words}")
    finally:
        end_descendants()


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


def _start_rank(rank: int, ranks: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a rank as torchrun does, out of reach of a terminal's Ctrl-C."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ckptool.commands.bench"],
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
