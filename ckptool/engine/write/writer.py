"""The writer of an unfinished output in a store, as noted there: stores have no locks."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.errors import NotFound
from ckptool.storage.multipart import hidden_name

if TYPE_CHECKING:
    from ckptool.storage.url import RemotePath


def this_writer() -> dict[str, Any]:
    """Return the note's description of this process; no two runs have the same."""
    return {
        "host": platform.node(),
        "process": os.getpid(),
        "started": _start_of(os.getpid()),
        "begun": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "token": os.urandom(8).hex(),
    }


def is_here(writer: Mapping[str, Any]) -> bool:
    """Return whether a writer ran on this machine."""
    return writer.get("host") == platform.node()


def is_running(writer: Mapping[str, Any]) -> bool:
    """Return whether a writer is another process of this machine that has not ended."""
    process = writer.get("process")
    if not is_here(writer) or not isinstance(process, int) or process == os.getpid():
        return False
    started = _start_of(process)
    return started is not None and started == writer.get("started")


def describe_writer(writer: Mapping[str, Any]) -> str:
    """Describe a writer in a few words."""
    return f"process {writer.get('process')} on {writer.get('host')}, {writer.get('begun')}"


def _start_of(process: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if it has ended."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def part_note(note: RemotePath, number: int) -> RemotePath:
    """Return where a part, counted from 0, records its writer and what it has written."""
    return note.with_name(f"{note.name}.{number + 1}")


def read_note(place: RemotePath) -> dict[str, Any] | None:
    """Read a note; None if there is none, or something else is there."""
    try:
        note = json.loads(place.read_bytes())
    except (NotFound, ValueError):
        return None
    return note if isinstance(note, dict) else None


def noted_files(note: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the files that an unfinished run wrote, and those that it was replacing."""
    if note is None:
        return frozenset()
    written = list(map(str, note.get("files", ())))
    return frozenset([*written, *map(hidden_name, written), *map(str, note.get("old", ()))])
