"""Processes as Linux's ``/proc`` shows them: who descends from whom, and what memory they hold."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptool.errors import CannotDo

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
    """CannotDo where the system has no ``/proc`` that says what memory a process holds."""
    if not _maps("self").exists():
        raise CannotDo("the benchmark needs Linux's /proc/PID/smaps, which is not here")


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
                told = Path(f"/proc/{name}/stat").read_text("utf-8", "replace")
                state, parent = told.rpartition(")")[2].split()[:2]
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


def kill_descendants(pid: int, patience: float = 5.0) -> None:
    """End everything below ``pid``, also what is started meanwhile; ``patience`` in seconds."""
    deadline = time.monotonic() + patience
    while (left := descendants(pid)) and time.monotonic() < deadline:
        kill(left)
