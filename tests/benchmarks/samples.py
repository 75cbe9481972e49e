"""One run of a command: what it took."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ckptool.commands.bench.isolated import search_path
from ckptool.errors import TransferError


class Sample(Struct, frozen=True):
    """One run of a command: seconds, and the largest resident set of any of its processes.

    ``load`` and ``read_bytes`` are what the command itself reports of a load, 0 elsewhere. Where it
    works on a store, ``cpu`` is that of the load alone, and the rest is what the store was asked:
    requests, bytes that it sent, and bytes that came.
    """

    wall: float
    cpu: float
    peak_bytes: int
    load: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    requests: int = 0


_LAUNCHER = """
import os, sys, time
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
begin = time.perf_counter()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(pid, 0)
wall = time.perf_counter() - begin
print(os.waitstatus_to_exitcode(status), wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""
"""Starts the command and waits. A peak counts from the parent's size, so the parent is small."""


def isolated_environment() -> dict[str, str]:
    """Return the environment for commands whose Pythons search what ``search_path`` does."""
    safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(search_path())}
    return os.environ | safe


def run_sample(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Sample:
    """Run a command to its end and return what it took.

    No Python in it imports from the current folder, unless its environment is given.
    TransferError with its own words where it fails. The command runs in a process group of its own,
    which is killed should this process be interrupted.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=isolated_environment() if environment is None else environment,
        start_new_session=True,
    )
    try:
        usage, words = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # ends when the last of the session has closed its stderr
        raise
    if process.returncode or not usage.startswith("0 "):
        code = (usage.split() or [str(process.returncode)])[0]
        raise TransferError(f"{' '.join(command)} ended with {code}: {_reason(words)}")
    wall, cpu, peak = map(float, usage.split()[1:])
    return Sample(wall, cpu, int(peak) * (1 if sys.platform == "darwin" else 1024))


def _reason(words: str) -> str:
    """Return the line of stderr that tells why a command failed."""
    lines = words.strip().splitlines() or ["no error message"]
    return next((line for line in lines if line.startswith("error: ")), lines[-1])
