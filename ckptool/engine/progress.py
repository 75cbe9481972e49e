"""Progress: how many bytes of all are read and written, counted for whoever shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Progress:
    """Bytes ``done`` of a ``total`` since a time (``time.monotonic``); threads may share it.

    A function may be called with both whenever bytes are counted.
    """

    def __init__(self, call: Callable[[int, int], object] | None = None) -> None:
        self.done = self.total = 0
        self.since = time.monotonic()
        self._call = call
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """Count anew, now that it is known how many bytes there are in all."""
        with self._lock:
            self.done, self.total, self.since = 0, total, time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count bytes that were read or written."""
        with self._lock:
            self.done += nbytes
            if self._call is not None:  # with the lock: its calls come one after the other
                self._call(self.done, self.total)


UNWATCHED = Progress()
"""Progress at which nobody looks."""
