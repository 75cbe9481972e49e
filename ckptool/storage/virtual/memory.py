"""Bytes in this process's memory, read like files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ckptool.storage.file_status import within_folder
from ckptool.storage.files import FileReader, Files, too_short


class MemoryFiles(Files, FileReader):
    """Buffers by the names of the files that they represent; they must not change meanwhile.

    ``token`` is their identity: a transfer from memory cannot be resumed.
    """

    root = "memory"

    def __init__(self, buffers: Mapping[str, memoryview]) -> None:
        self._buffers = buffers
        self.token = os.urandom(8).hex()
        self.files = {name: len(data) for name, data in buffers.items()}
        self.unlisted = {}

    def narrowed(self, folder: str) -> MemoryFiles:
        """Return the files below a folder, by their paths relative to it."""
        return MemoryFiles(within_folder(self._buffers, folder))

    def subfolders(self) -> Mapping[str, MemoryFiles]:
        """Return none: names are flat."""
        return {}

    def alone(self, name: str) -> MemoryFiles:
        """Return one of the files alone."""
        return MemoryFiles({name: self._buffers[name]})

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return the identity of the buffers."""
        return self.token

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return none: changes of memory are not detected."""
        return []

    def modified(self, file: str) -> float:
        """Return 0: it is unknown."""
        return 0.0

    def reader(self) -> MemoryFiles:
        """Return itself: nothing is open."""
        return self

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        data = self._buffers[file]
        if offset < 0 or offset + buffer.nbytes > len(data):
            raise too_short(file, offset, buffer.nbytes, len(data))
        buffer.cast("B")[:] = data[offset : offset + buffer.nbytes]
