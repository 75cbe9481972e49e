"""Write bytes into staged files, at any offset and from several threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ckptool.errors import TransferError
from ckptool.storage.disk import open_unfollowed

_WRITE = 1 << 19
"""Bytes of one write, while the processor's cache holds them."""
_MOST_OPEN = 32
"""Descriptors of one thread."""


class OutputFiles:
    """The files below a folder; each thread that writes has descriptors of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()
        self._threads: list[dict[str, int]] = []

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Write all bytes at an offset of a file; TransferError where that fails."""
        descriptor = self._descriptor(path)
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(descriptor, data[done : done + _WRITE], offset + done)
            except OSError as error:
                raise TransferError(f"{path}: {error.strerror} at byte {offset + done:,}") from None

    def close(self) -> None:
        """Close the descriptors of all threads, none of which writes any longer."""
        for descriptors in self._threads:
            _close_all(descriptors)

    def _descriptor(self, path: str) -> int:
        descriptors: dict[str, int] | None = getattr(self._local, "descriptors", None)
        if descriptors is None:
            descriptors = self._local.descriptors = {}
            self._threads.append(descriptors)
        if path not in descriptors:
            if len(descriptors) >= _MOST_OPEN:
                _close_all(descriptors)
            descriptors[path] = open_unfollowed(Path(f"{self._folder}/{path}"), os.O_WRONLY)
        return descriptors[path]


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
