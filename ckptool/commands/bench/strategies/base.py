"""The interface of a strategy: a way to save, through a library's public API."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptool.commands.bench.worker.device import Device

State = dict[str, Any]
"""A nested state dict with DTensors."""

_NOT_PINNED = "staged in shared memory, not pinned: torch pins with CUDA alone"


class Environment(Struct, frozen=True):
    """What a strategy may depend on: the device, the ranks, the bytes of the state and of free
    shared memory, and the target folder.
    """

    device: Device
    ranks: int
    nbytes: int
    shared_free: int
    folder: Path

    def lacks_shared_memory(self) -> str | None:
        """Return why state cannot be staged in shared memory here, with numbers, or None."""
        if self.shared_free >= self.nbytes * 21 // 20:
            return None
        free, size = f"{self.shared_free:,}", f"{self.nbytes:,}"
        return f"/dev/shm has {free} bytes free, staging needs {size}"


class Handle:
    """A save in progress; this base class is one that was complete when the call returned."""

    def __init__(self) -> None:
        self._ended = time.perf_counter()

    def staged(self) -> None:
        """Wait until the library allows the state to be changed; this blocks the loop."""

    def done(self) -> bool:
        """Whether this rank's background work is over. Does not ask other ranks."""
        return True

    def commit(self) -> float:
        """Finish the save once all ranks are done; this blocks the loop.

        Returns when the library considered the checkpoint written, by ``perf_counter``. Raises
        errors from the background.
        """
        return self._ended


class PendingSave(Handle):
    """A save that a future ends; ``staged`` waits until the state may change."""

    def __init__(self, written: Future[Any], staged: Callable[[], object] | None = None) -> None:
        self._written, self._staged, self._ended = written, staged, 0.0
        written.add_done_callback(self._record_end)

    def _record_end(self, written: Future[Any]) -> None:
        self._ended = time.perf_counter()

    def staged(self) -> None:
        """Wait until the state may change, if the library has a way to wait for that."""
        if self._staged is not None:
            self._staged()

    def done(self) -> bool:
        """Return whether writing has ended."""
        return self._written.done()

    def commit(self) -> float:
        """Return when the future was set; raise its exception if it has one."""
        self._written.result()
        return self._ended or time.perf_counter()


class Strategy:
    """A way to save. An instance lives in every rank, and saves many times.

    ``name`` is ``FAMILY`` or ``FAMILY/VARIANT``, ``says`` its description. ``background`` means
    that training continues during the save, ``must_wait`` that the library requires
    ``Handle.staged`` before the state changes, ``to_urls`` that it can save to a URL; others save
    only to disks. ``shares`` means that it stages in shared memory, ``pins`` that it pins that if
    the device can.
    """

    name = ""
    says = ""
    library = "torch"
    background = False
    must_wait = False
    to_urls = False
    shares = False
    pins = False

    def unavailable(self, environment: Environment) -> str | None:
        """Return why it cannot run here, or None."""
        return environment.lacks_shared_memory() if self.shares else None

    def remark(self, environment: Environment) -> str | None:
        """Return how this differs here from what the name promises, or None."""
        return _NOT_PINNED if self.pins and not environment.device.pins else None

    def set_up(self, device: Device) -> None:
        """Prepare for the first save; the process group is up."""

    def save(self, state: State, path: Any) -> Handle:
        """Save to a folder that does not exist yet; all ranks call it at once.

        ``path`` is a ``Path``, or with ``to_urls`` maybe a URL as ``str``.
        """
        raise NotImplementedError

    def load(self, state: State, path: Any) -> State:
        """Load a checkpoint back through the library; ``state`` is zeros, to load into."""
        raise NotImplementedError

    def finish(self) -> None:
        """Release everything that ``set_up`` and ``save`` made."""
