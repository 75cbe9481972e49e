"""A fresh process of a rank: forked from one that has torch imported and nothing else begun.

Processes as Linux's ``/proc`` shows them: who descends from whom, and what memory they hold.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckptool.errors import Unsupported

_SAMPLE = 0.05
_MOST_TIME_SAMPLING = 0.05
_LAST = ("end", "failed", "lost")
_AWAITED = ("training", "checking")

Tell = Callable[[str, Any], None]
Work = Callable[[Tell], Any]
Stop = Callable[[], str | None]


@dataclass(slots=True)
class Memory:
    """Bytes of host memory of the process and its children: when training began, and the most."""

    base: int = 0
    peak: int = 0


@dataclass(slots=True)
class Ended:
    """How a process ended: what its work returned, or what went wrong."""

    value: Any = None
    failure: str | None = None
    memory: Memory = field(default_factory=Memory)


class Child:
    """Work in a process of its own. Its words, and its children's, go to the file ``log``."""

    def __init__(self, work: Work, log: Path, timeout: float = 300.0) -> None:
        """``timeout``: seconds without a word after which the process is held for hung."""
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._log, self._timeout = log, timeout
        self._process = context.Process(target=_child, args=(work, theirs, log))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def watch(
        self, stop: Stop, on_event: Tell, *, measure: bool = False, pause: float = _SAMPLE
    ) -> Ended:
        """Wait until it ends; with ``measure``, look at its memory from ``training`` on.

        ``stop`` is asked every ``pause`` seconds; the reason it gives ends the process, as a long
        silence does. Memory is looked at until it says ``checking``; the process waits for the
        first look and for the last.
        """
        memory, sampling = Memory(), False
        last_event = time.monotonic()
        while True:
            word, value = self._next(pause)
            if word in _LAST:
                break
            if word:
                last_event = time.monotonic()
                on_event(word, value)
            sampling = sampling or (measure and word == "training")
            if sampling:
                pause = self._sample(memory, begin=word == "training")
            if word in _AWAITED:
                self._pipe.send(None)
                sampling = sampling and word != "checking"
            reason = stop() or self._silent(last_event)
            if reason:
                word, value = "failed", reason
                break
        if word == "end":
            return Ended(value, None, memory)
        failure = value or self._last_words()
        self.kill()
        return Ended(None, failure, memory)

    def _next(self, timeout: float) -> tuple[str, Any]:
        """The next word within ``timeout`` seconds; empty without one, ``lost`` at its end."""
        try:
            if not self._pipe.poll(timeout):
                return "", None
            word, value = self._pipe.recv()
        except (EOFError, OSError):
            return "lost", None
        return word, value

    def _silent(self, last_event: float) -> str | None:
        silent = time.monotonic() - last_event > self._timeout
        return f"hung: not a word in {self._timeout:,.0f} s" if silent else None

    def _sample(self, memory: Memory, *, begin: bool) -> float:
        """Look at the memory; the seconds to wait so that looking stays cheap."""
        started = time.perf_counter()
        now = resident([self.pid, *(process.pid for process in descendants(self.pid))])
        memory.base = now if begin else memory.base
        memory.peak = max(memory.peak, now)
        return max(_SAMPLE, (time.perf_counter() - started) / _MOST_TIME_SAMPLING)

    def _last_words(self) -> str:
        self._process.join(1)
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        code = self._process.exitcode
        return lines[-1].strip() if lines else f"the process ended with {code} and said nothing"

    def join(self, timeout: float = 20.0) -> None:
        """Wait for the end of a process whose work is done; kill it where it stays."""
        self._process.join(timeout)
        self.kill()

    def kill(self) -> None:
        """End the process itself at once, not its children."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


def orphans(timeout: float) -> list[Process]:
    """What still runs below this process after ``timeout`` seconds: it should have ended."""
    deadline = time.monotonic() + timeout
    while (left := _own_descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _own_descendants() -> list[Process]:
    found = descendants(os.getpid())
    return [process for process in found if "resource_tracker" not in process.command]


def end_orphans() -> None:
    """Kill whatever runs below this process."""
    kill(descendants(os.getpid()))


def _child(work: Work, pipe: Connection, log: Path) -> None:
    """The process itself. Ctrl-C is for the one that watches, which ends this one."""
    die_with_parent()
    gc.freeze()  # collecting would write to, and so copy, every page shared with the parent
    gc.enable()  # the command line goes without
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(words, 1)
    os.dup2(words, 2)

    def tell(word: str, value: Any) -> None:
        pipe.send((word, value))
        if word in _AWAITED:
            pipe.recv()

    try:
        tell("end", work(tell))
    except BaseException as error:
        traceback.print_exc()
        kind, lines = type(error).__name__, str(error).strip().splitlines() or [""]
        tell("failed", f"{kind}: {lines[-1].removeprefix(f'{kind}: ')}".rstrip(": "))


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MOST_WORDS = 120


@dataclass(frozen=True, slots=True)
class Process:
    """A process that runs: its id, and its parent's."""

    pid: int
    parent: int

    @property
    def command(self) -> str:
        """Its command line, as long as it runs."""
        with suppress(OSError):
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ")
            return words.decode("utf-8", "replace").strip()[:_MOST_WORDS]
        return ""


def require_proc() -> None:
    """Unsupported where the system has no ``/proc`` that says what memory a process holds."""
    if not _maps("self").exists():
        raise Unsupported("the benchmark needs Linux's /proc/PID/smaps, which is not here")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """End this process by SIGKILL when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(pid: int) -> list[Process]:
    """The running processes below ``pid``; zombies do not run."""
    children: dict[int, list[Process]] = {}
    for process in _running():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(pid, ()))
    for process in found:
        found += children.get(process.pid, ())
    return found


def _running() -> Iterable[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError):
                # pid (command) state parent ...: the command may hold anything
                status = Path(f"/proc/{name}/stat").read_text("utf-8", "replace")
                state, parent = status.rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    yield Process(int(name), int(parent))


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory the processes hold together; what they share counts once (PSS)."""
    return sum(map(_proportional, pids))


def _proportional(pid: int) -> int:
    with suppress(OSError):
        lines = _maps(pid).read_text("utf-8", "replace").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def _maps(pid: int | str) -> Path:
    """What tells the memory of a process: in all, or where the system has no such, by mapping."""
    whole = Path(f"/proc/{pid}/smaps_rollup")
    return whole if whole.exists() else whole.with_name("smaps")


def kill(processes: Iterable[Process]) -> None:
    """End processes at once, and wait for those that are this one's own children."""
    for process in processes:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        with suppress(OSError):
            os.waitpid(process.pid, 0)


def kill_descendants(pid: int, timeout: float = 5.0) -> None:
    """End everything below ``pid``, also what is started meanwhile; ``timeout`` in seconds."""
    deadline = time.monotonic() + timeout
    while (left := descendants(pid)) and time.monotonic() < deadline:
        kill(left)
