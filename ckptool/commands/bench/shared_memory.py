"""Shared memory that the benchmark's own processes hold, and may leave behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def free_shared_memory() -> int:
    """Return the bytes that can still be put into shared memory."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


class SharedMemory:
    """The shared memory that a look found processes to hold, and that was not there before.

    Only that is known to be theirs: programs of the same user share the folder, and names tell
    nothing for certain.
    """

    def __init__(self) -> None:
        self._before = {inode for _, inode in _listing()}
        self._seen: dict[int, Path] = {}

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Take note of what these processes hold now."""
        for process in processes:
            for path, inode in _memory_of(process.pid):
                if inode not in self._before:
                    self._seen[inode] = path

    def left(self, doomed: Collection[int] = ()) -> list[Path]:
        """Return what is still there and no process holds but those ``doomed``, by their ids."""
        paths = sorted(path for inode, path in self._seen.items() if _inode(path) == inode)
        if not paths:
            return []
        users = (pid for pid in psutil.pids() if pid not in doomed)
        in_use = {inode for pid in users for _, inode in _memory_of(pid)}
        return [path for path in paths if _inode(path) not in in_use]

    def remove_left(self) -> None:
        """Remove what is left."""
        for path in self.left():
            with suppress(OSError):
                path.unlink()


def _listing() -> Iterator[tuple[Path, int]]:
    """Yield every file in shared memory, with its inode."""
    for folder, _, names in os.walk(SHARED_MEMORY):
        for path in (Path(folder, name) for name in names):
            if (inode := _inode(path)) is not None:
                yield path, inode


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.lstat().st_ino
    return None


def _memory_of(pid: int) -> Iterator[tuple[Path, int]]:
    """Yield the shared memory that a process has open or mapped, as far as permitted."""
    head, process = f"{SHARED_MEMORY}/", Path(f"/proc/{pid}")
    with suppress(OSError):
        for descriptor in os.listdir(process / "fd"):
            with suppress(OSError):
                link = process / "fd" / descriptor
                if (path := os.readlink(link)).startswith(head):
                    yield Path(path), link.stat().st_ino
    with suppress(OSError):
        for line in (process / "maps").read_text("utf-8", "surrogateescape").splitlines():
            *_, inode, path = line.split(maxsplit=5) if head in line else ("0", "")
            if path.startswith(head):
                yield Path(path), int(inode)
