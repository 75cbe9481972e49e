"""What the page cache holds before a command is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PIECE = 1 << 20
_STEP = 1 << 28
"""Bytes that are read at a time, then it is seen whether free memory went down by them."""


def walk_files(path: Path) -> Iterator[Path]:
    """Yield the files of a folder, or a file itself."""
    yield from [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())


def warm(checkpoint: Path) -> None:
    """Read a checkpoint, so that no row pays for evictions from the page cache."""
    for file in walk_files(checkpoint):
        with open(file, "rb") as stream:
            while stream.read(_PIECE):
                pass


def drop(checkpoint: Path) -> None:
    """Evict a checkpoint from the page cache; all of it is on the disk already."""
    for file in walk_files(checkpoint):
        with open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Filler:
    """A file of zeros that takes no room on the disk, with which the page cache is filled.

    The cache of a machine that has been up for a while is full: what is written goes where older
    pages were. Where files were just removed it is not, and a virtual machine gives such memory
    back to its host within seconds. Commands that write there wait for the host, some for three
    times as long as they work, and others not at all, by the size of the pages that they take.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open(path, "wb") as file:
            file.truncate(self._size)

    def fill(self) -> None:
        """Read on in the file while that takes memory that held nothing."""
        with open(self._path, "rb", buffering=0) as file:
            file.seek(self._at)
            taken = _STEP
            while taken >= _STEP // 2 and self._at < self._size:
                before = free_memory()
                for _ in range(_STEP // _PIECE):
                    self._at += len(file.read(_PIECE))
                taken = before - free_memory()
        self._at %= self._size


def free_memory() -> int:
    """Return the bytes of memory that hold nothing, not even what was once read."""
    with open("/proc/meminfo") as lines:
        told = dict(line.split(":") for line in lines)
    return int(told["MemFree"].split()[0]) << 10
