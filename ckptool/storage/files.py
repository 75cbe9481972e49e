"""Folders and files to read from, wherever they lie: what can be asked of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from msgspec import Struct

from ckptool.errors import Damaged, NotFound, Problem, refused_hint
from ckptool.storage.file_status import missing

ReadSpan = tuple[str, int, int]
"""A file, and the offset and number of bytes that are read of it."""

SPAN = 4 << 20
"""Bytes that are read at once to gather scattered elements."""
TILE = 1 << 20
"""Bytes that are moved at a time on a disk, unless one element is larger."""


def count_cores() -> int:
    """Return how many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


CORES = min(8, count_cores())
"""Threads of a command: more would only wait for a disk, whose reads the kernel orders."""
_MOST_READERS = 16
"""Threads that load into memory: on 16 cores they read the page cache 1.4 times as fast as 8."""


class ReadPolicy(Struct, frozen=True):
    """What the reads of a place cost, and so how they are made.

    ``tile`` is how many bytes are moved at a time, ``block`` the least number that a read costs:
    shorter gaps are read too. ``workers`` is the number of threads of a command, unless the user
    sets it. ``by_request`` says that each read is a request, which takes long: all are announced,
    joined, and fetched ahead; on a disk they are not.
    """

    tile: int = TILE  # read, checked and written while it is in the processor's cache
    block: int = 1
    workers: int = CORES
    by_request: bool = False

    @property
    def load_workers(self) -> int:
        """Threads that load into memory: torchrun's ranks share a machine's cores, not a store."""
        if self.by_request:
            return self.workers
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        cores = count_cores() // max(1, int(ranks) if ranks.isdecimal() else 1)
        return max(1, min(_MOST_READERS, cores))


class FileReader(Protocol):
    """A reader for one thread."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last."""
        for at, run in enumerate(runs):
            self.read_into(file, offset + at * step, run)

    def close(self) -> None:
        """Release all resources, if it has any but memory."""
        return


class Files(Protocol):
    """A folder of files, or some of them, wherever it lies."""

    policy: ReadPolicy = ReadPolicy()
    """What its reads cost, and so how they are made."""
    root: str
    """The folder, as the user would name it."""
    files: Mapping[str, int]
    """Every file by its relative path with ``/``, and its size in bytes."""
    unlisted: Mapping[str, Problem]
    """Why files and folders below are missing in ``files``, by path."""

    def narrowed(self, folder: str) -> Files:
        """Return the part below a subfolder, as a source of its own."""

    def subfolders(self) -> Mapping[str, Files]:
        """Return every folder below, at any depth, as a source of its own."""

    def alone(self, name: str) -> Files:
        """Return one of the files alone, with the ``.extra.pt`` file beside it."""

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return a SHA-256 (hex) that changes with the files; ``exact``: despite times set back."""

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return those files that were written, replaced or removed since listed."""

    def modified(self, file: str) -> float:
        """Return when a file was last modified, in seconds since the epoch; 0 if unknown."""

    def expect(self, spans: Iterable[ReadSpan]) -> None:
        """Prepare for the next reads."""
        return

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` at ``offset``; Damaged if they are not there."""
        if file not in self.files:
            raise missing(file)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.files[file]:
            raise too_short(file, offset, nbytes, self.files[file])
        stream = io.BytesIO(bytes(nbytes))  # a bytes object, without a copy
        with closing(self.reader()) as reader, stream.getbuffer() as memory:
            reader.read_into(file, offset, memory)
        return stream.getvalue()

    def plan_reads(self, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        """Prepare for all next reads, in order: each byte may be fetched ahead, once.

        Call the result when everything has been read, or nothing more will be.
        """
        return lambda: None

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes that were read, or fetched ahead; the kernel may keep more."""
        return

    def reader(self) -> FileReader:
        """Return a reader for one thread."""


def unreadable(file: str, error: OSError) -> NotFound:
    """Return the error for a file that cannot be opened or read."""
    problem = Problem(f"{file}: cannot be read: {error.strerror}", "file-unreadable", file=file)
    hint = refused_hint(error)
    return NotFound(problem.with_hint(hint) if hint else problem)


def too_short(file: str, offset: int, nbytes: int, size: int) -> Damaged:
    """Return the error for a file of ``size`` bytes that ends before a read does."""
    return Damaged(
        f"{file}: {nbytes:,} bytes are expected at offset {offset:,}, but the file has"
        f" {size:,} bytes; it is truncated or its metadata is wrong",
        "file-truncated",
        file=file,
        end=offset + nbytes,
    )
