"""Who writes an unfinished output: a store has no locks, so that its note names a process."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

UNFINISHED = ".ckptool-unfinished.json"
"""The note that lies in a folder of a store from the first byte on until all is written."""


def this_writer() -> dict[str, Any]:
    """What a note says of this process; no two runs say the same."""
    return {
        "host": platform.node(),
        "process": os.getpid(),
        "started": _start_of(os.getpid()),
        "begun": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "token": os.urandom(8).hex(),
    }


def is_here(writer: Mapping[str, Any]) -> bool:
    """Whether it ran on this machine."""
    return writer.get("host") == platform.node()


def is_running(writer: Mapping[str, Any]) -> bool:
    """Whether it is another process of this machine that has not ended."""
    process = writer.get("process")
    if not is_here(writer) or not isinstance(process, int) or process == os.getpid():
        return False
    started = _start_of(process)
    return started is not None and started == writer.get("started")


def described(writer: Mapping[str, Any]) -> str:
    """A writer in a few words."""
    return f"process {writer.get('process')} on {writer.get('host')}, {writer.get('begun')}"


def _start_of(process: int) -> str | None:
    """When a process started, in the kernel's ticks; None where there is none, or it has ended."""
    with suppress(OSError, IndexError):
        found = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if found[0] == "Z" else found[19]
    return None
