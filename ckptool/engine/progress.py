"""Progress: how many bytes of all are read and written, counted for whoever shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Progress:
    """Bytes ``done`` of a ``total`` since a time (``time.monotonic``); threads may share it."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self.since = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """Count anew, now that it is known how many bytes there are in all."""
        with self._lock:
            self.done, self.total, self.since = 0, total, time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count bytes that were read or written."""
        with self._lock:
            self.done += nbytes


class CalledProgress(Progress):
    """Progress that calls a function with the bytes done and those in all, whenever it counts."""

    def __init__(self, call: Callable[[int, int], object]) -> None:
        super().__init__()
        self._call = call

    def add(self, nbytes: int) -> None:
        """Count bytes that were read or written."""
        with self._lock:
            self.done += nbytes
            self._call(self.done, self.total)


UNWATCHED = Progress()
"""Progress at which nobody looks."""
