"""Processes of a rank: fork one, watch it, measure its memory, and end what it leaves."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from ckptool.errors import Unsupported

_SAMPLE = 0.05
_MOST_TIME_SAMPLING = 0.05
_MOST_TIME_ENDING = 20.0
_LAST = ("end", "failed", "lost")
_AWAITED = ("training", "checking", "end", "failed")

Tell = Callable[[str, Any], None]
"""Sends a word, with its data, to the watching process."""

Work = Callable[[Tell], Any]

Look = Callable[[Iterable[psutil.Process]], None]
"""Takes note of what processes hold."""


class ChildResult(Struct):
    """How a process ended: the result of its work, or the error.

    ``base`` and ``peak`` are bytes of host memory of the process and its children: when training
    began, and the most since.
    """

    value: Any = None
    failure: str | None = None
    base: int = 0
    peak: int = 0


def run_child(
    work: Work,
    log: Path,
    *,
    timeout: float = 300.0,
    stop: Callable[[], str | None] = lambda: None,
    on_event: Tell = lambda word, value: None,
    look: Look = lambda processes: None,
    measure: bool = False,
    pause: float = _SAMPLE,
) -> ChildResult:
    """Work in a separate process, and wait until it ends. Its output goes to ``log``.

    ``stop`` is called every ``pause`` seconds; a reason that it returns ends the process, but not
    its children, as do ``timeout`` seconds without a word. ``look`` is given it and its children
    whenever it waits, and before its end. With ``measure``, memory is sampled from the word
    ``training`` to ``checking``; the process waits for the first sample and for the last.
    """
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_do_work, args=(work, theirs, log))
    process.start()
    theirs.close()
    result, sampling = ChildResult(), False
    last_event = time.monotonic()
    while True:
        word, value = _next_event(pipe, pause)
        if not word and process.exitcode is not None:  # what it forked may hold the pipe open
            word, value = _next_event(pipe, 0)
            word = word or "lost"
        if word in _LAST:
            break
        if word:
            last_event = time.monotonic()
            on_event(word, value)
        sampling = sampling or (measure and word == "training")
        if sampling:
            pause = _sample(process.pid or 0, result, begin=word == "training")
        if word in _AWAITED:
            look(with_descendants(process.pid))
            pipe.send(None)
            sampling = sampling and word != "checking"
        hung = time.monotonic() - last_event > timeout
        reason = stop() or (f"hung: no progress in {timeout:,.0f} s" if hung else None)
        if reason:
            word, value = "stopped", reason
            break
    look(with_descendants(process.pid))
    if word in _AWAITED:
        pipe.send(None)
    _end(process, result, word, value, log)
    pipe.close()
    return result


def _end(process: Any, result: ChildResult, word: str, value: Any, log: Path) -> None:
    """Note what came of a process by its last word, and see that it ends."""
    if word == "end":
        result.value = value
        process.join(_MOST_TIME_ENDING)
    elif word == "lost":
        process.join(1)
        result.failure = last_line(log) or f"the process ended with exit code {process.exitcode}"
    else:
        result.failure = value
    process.kill()
    process.join()


def _next_event(pipe: Connection, timeout: float) -> tuple[str, Any]:
    """Wait for a word up to ``timeout`` seconds; empty without one, ``lost`` at its end."""
    try:
        if not pipe.poll(timeout):
            return "", None
        word, value = pipe.recv()
    except (EOFError, OSError):
        return "lost", None
    return word, value


def _sample(pid: int, result: ChildResult, *, begin: bool) -> float:
    """Measure the memory; return the seconds to wait so that measuring stays cheap."""
    started = time.perf_counter()
    with suppress(psutil.Error):
        now = proportional_memory(with_descendants(pid))
        result.base = now if begin else result.base
        result.peak = max(result.peak, now)
    return max(_SAMPLE, (time.perf_counter() - started) / _MOST_TIME_SAMPLING)


def last_line(log: Path) -> str:
    """Return the last line that processes printed; empty if they printed nothing."""
    return log.read_text("utf-8", "replace").strip().rpartition("\n")[2].strip()


def _do_work(work: Work, pipe: Connection, log: Path) -> None:
    """Do the work, in the process itself. Ctrl-C goes to the watching one, which ends this one."""
    die_with_parent()
    gc.freeze()  # collecting would write to, and so copy, every page shared with the parent
    gc.enable()  # not needed by the command line
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)

    def tell(word: str, value: Any) -> None:
        pipe.send((word, value))
        if word in _AWAITED:
            pipe.recv()

    try:
        tell("end", work(tell))
    except BaseException as error:  # noqa: BLE001 (the rank that watches reports it)
        traceback.print_exc()
        kind, lines = type(error).__name__, str(error).strip().splitlines() or [""]
        tell("failed", f"{kind}: {lines[-1].removeprefix(f'{kind}: ')}".rstrip(": "))


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MOST_WORDS = 120


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process sent a signal when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def require_proportional_memory() -> None:
    """Raise Unsupported if the system does not count shared pages by their users (PSS)."""
    if not hasattr(psutil.Process().memory_full_info(), "pss"):
        raise Unsupported("the benchmark needs Linux's /proc/PID/smaps, which this system lacks")


def proportional_memory(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of processes together, in bytes; shared memory counts once (PSS)."""
    nbytes = 0
    for process in processes:
        with suppress(psutil.Error):
            nbytes += process.memory_full_info().pss
    return nbytes


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the processes below a process, by default this one; without zombies."""
    with suppress(psutil.Error):
        return list(filter(_runs, psutil.Process(pid).children(recursive=True)))
    return []


def with_descendants(pid: int | None) -> list[psutil.Process]:
    """Return a process and those below it."""
    with suppress(psutil.Error):
        return [psutil.Process(pid), *descendants(pid)]
    return []


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process, cut to 120 characters; empty once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:_MOST_WORDS]
    return ""


def orphans(timeout: float) -> list[psutil.Process]:
    """Return the processes that are still below this one after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        processes = [p for p in descendants() if "resource_tracker" not in command_line(p)]
        if not processes or time.monotonic() >= deadline:
            return processes
        time.sleep(0.05)


def end_descendants(look: Look = lambda processes: None, timeout: float = 5.0) -> None:
    """Kill all processes below this one, including those started within ``timeout`` seconds.

    For a process that the benchmark itself started: all below it are the benchmark's, too.
    """
    deadline = time.monotonic() + timeout
    while (processes := descendants()) and time.monotonic() < deadline:
        look(processes)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        for process in processes:
            with suppress(OSError):
                os.waitpid(process.pid, 0)
