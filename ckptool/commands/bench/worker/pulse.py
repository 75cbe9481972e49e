"""Whether a job of the ranks goes on: what its processes do, and what appears on the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ckptool.commands.bench.processes import command_line, descendants
from ckptool.commands.bench.save_folders import DiskFolder

_EVERY = 1.0
_IDLE = 0.05
"""The share of a core that processes may use while they only wait."""

BESIDE, DONE = "beside", "done"
"""Words of a process: it trains beside a save from now on (with its id); its save is done."""

_SAVING = (BESIDE, "save", "saving", "checking")
"""Words after which no process may end without a trace of what comes next."""

MOST_SILENT = 25.0
MOST_SILENT_AFTER_A_DEATH = 3.0
"""Seconds; another may pass until it is noticed."""


class Pulse:
    """Looks at the processes below this one about once a second, and says why a job is over.

    The job goes on while on any rank files grow, or processes use the processor or wait for the
    disk. What a process uses that trains beside a save does not count: it goes on, whatever the
    save does. ``count`` adds to a number that all ranks share, and returns it. Without a
    ``folder``, on a disk, it says nothing: nobody sees from here whether an upload goes on.
    """

    def __init__(
        self, folder: Path | None, count: Callable[[int], int], most_silent: float = MOST_SILENT
    ) -> None:
        self._folder, self._count, self._most_silent = folder, count, most_silent
        self._looked = self._last = time.monotonic()
        self._beats = 0
        self._nbytes = 0
        self._used: dict[int, float] = {}
        self._commands: dict[int, str] = {}
        self._training: int | None = None
        self._saves = False
        self._died: str | None = None

    def hear(self, word: str, value: Any) -> None:
        """Take note of a word of the process."""
        self._last = time.monotonic()
        self._training = value if word == BESIDE else None
        self._saves = word in _SAVING
        self._died = None

    def problem(self) -> str | None:
        """Return why the job will not end, or None while it goes on."""
        now = time.monotonic()
        if self._folder is None or now - self._looked < _EVERY:
            return None
        seconds, self._looked = now - self._looked, now
        processes = descendants()
        goes_on = self._grows(self._folder) | self._works(processes, seconds)
        beats = self._count(int(goes_on))
        if beats != self._beats:
            self._beats, self._last = beats, now
        silent = now - self._last
        if self._died and silent > MOST_SILENT_AFTER_A_DEATH:
            return f"a process of the save ended before it was saved: {self._died}"
        if silent <= self._most_silent:
            return None
        stopped = [command_line(p) for p in processes if _is_stopped(p)]
        return f"hung: nothing happened for {silent:.0f} s" + (
            f"; a process is stopped: {stopped[0]}" if stopped else ""
        )

    def _grows(self, folder: Path) -> bool:
        """Whether there are other bytes on the disk than at the last look."""
        last_size = self._nbytes
        try:
            self._nbytes = sum(DiskFolder(folder).sizes().values())
        except OSError:  # what was listed is renamed or removed by now
            return True
        return self._nbytes != last_size

    def _works(self, processes: list[psutil.Process], seconds: float) -> bool:
        """Whether a process has worked since the last look; takes note of those that ended."""
        used = {p.pid: _seconds_used(p) for p in processes if p.pid != self._training}
        busy = sum(max(0.0, used[pid] - self._used.get(pid, 0.0)) for pid in used)
        commands = {process.pid: command_line(process) for process in processes}
        ended = [command for pid, command in self._commands.items() if pid not in commands]
        if ended and self._saves:
            self._died = self._died or ended[0]
        self._used, self._commands = used, commands
        return busy > _IDLE * seconds or any(map(_waits_for_disk, processes))


def _seconds_used(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _waits_for_disk(process: psutil.Process) -> bool:
    """Whether one of its threads does: in ``fsync`` no time is used, and nothing grows."""
    tasks = Path(f"/proc/{process.pid}/task")
    with suppress(OSError):
        for task in os.listdir(tasks):
            with suppress(OSError):
                stat = (tasks / task / "stat").read_bytes()
                if stat.rpartition(b")")[2].split()[0] == b"D":
                    return True
    return False
