"""What a strategy is: a way to save, through the public API of the library that has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool.commands.bench.worker.device import Device

State = dict[str, Any]
"""A nested state dict with DTensors."""

_NOT_PINNED = "staged in shared memory, not pinned: torch pins with CUDA alone"


@dataclass(frozen=True, slots=True)
class Place:
    """What a strategy may depend on: the device, the ranks, the bytes of the state and of free
    shared memory, and the folder to write in."""

    device: Device
    ranks: int
    nbytes: int
    shared_free: int
    folder: Path

    def lacks_shared_memory(self) -> str | None:
        """Return why state cannot be staged in shared memory here, with numbers, or None."""
        if self.shared_free >= self.nbytes * 21 // 20:
            return None
        free, needed = f"{self.shared_free:,}", f"{self.nbytes:,}"
        return f"/dev/shm has {free} bytes free, staging needs {needed}"


class Handle:
    """A save that was started; as it stands, one that was complete when the call returned."""

    def __init__(self) -> None:
        self._ended = time.perf_counter()

    def staged(self) -> None:
        """Wait until the library allows the state to be changed; the loop is blocked meanwhile."""

    def done(self) -> bool:
        """Whether this rank's background work is over. Asks no other rank."""
        return True

    def commit(self) -> float:
        """Do what the loop must still do once all ranks are done; it is blocked meanwhile.

        Returns when the library held the checkpoint for written, by ``perf_counter``. Raises what
        went wrong in the background.
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
        """Wait as the library wants it."""
        if self._staged is not None:
            self._staged()

    def done(self) -> bool:
        """Whether the writing future is."""
        return self._written.done()

    def commit(self) -> float:
        """Return when the future was set; raise its exception where it has one."""
        self._written.result()
        return self._ended or time.perf_counter()


class Strategy:
    """A way to save. An instance lives in every rank, and saves many times.

    ``name`` is ``FAMILY`` or ``FAMILY/VARIANT``, ``says`` what a person would call it.
    ``background`` tells whether training goes on during the save, ``must_wait`` whether the library
    wants ``Handle.staged`` awaited before the state changes, ``to_urls`` whether it can save to a
    URL; others save to disks only. ``shares`` and ``pins`` tell whether it stages in shared memory,
    and pins that where the device can.
    """

    name = ""
    says = ""
    library = "torch"
    background = False
    must_wait = False
    to_urls = False
    shares = False
    pins = False

    def unavailable(self, place: Place) -> str | None:
        """Return why it cannot run here, or None."""
        return place.lacks_shared_memory() if self.shares else None

    def remark(self, place: Place) -> str | None:
        """Return what is different here from what the name promises, or None."""
        return _NOT_PINNED if self.pins and not place.device.pins else None

    def set_up(self, device: Device) -> None:
        """Make ready for the first save; the process group is up."""

    def save(self, state: State, path: Any) -> Handle:
        """Save to a folder that does not exist yet; all ranks call it at once.

        ``path`` is a ``Path``, or with ``to_urls`` maybe a URL as ``str``.
        """
        raise NotImplementedError

    def load(self, state: State, path: Any) -> State:
        """Load a checkpoint back as the library does it; ``state`` is zeros, to load into."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let go of all that ``set_up`` and ``save`` made."""
