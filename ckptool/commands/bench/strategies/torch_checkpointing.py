"""The torch_checkpointing package (0.1): its ``CheckpointManager``, which saves asynchronously."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptool.commands.bench.machine import installed_version
from ckptool.commands.bench.strategies.base import (
    NOT_PINNED,
    Handle,
    PendingSave,
    Place,
    State,
    Strategy,
)
from ckptool.commands.bench.worker.device import Device


class TorchCheckpointing(Strategy):
    """The manager's defaults, with or without ``O_DIRECT``."""

    library = "torch_checkpointing"
    background = True
    must_wait = True

    def __init__(self, *, direct: bool) -> None:
        self.name = "torch-checkpointing/" + ("direct" if direct else "buffered")
        self.says = f"torch_checkpointing with {'direct' if direct else 'buffered'} I/O"
        self._direct = direct
        self._manager: Any = None

    def unavailable(self, place: Place) -> str | None:
        """Require the package, and shared memory to stage in."""
        if installed_version(self.library) is None:
            return "torch_checkpointing is not installed (pip install torch-checkpointing)"
        if self._direct and not _accepts_unaligned(place.folder):
            return "it writes unaligned pieces with O_DIRECT, which the file system here refuses"
        return place.lacks_shared_memory()

    def remark(self, place: Place) -> str | None:
        """Note staging that does not pin."""
        return None if place.device.pins else NOT_PINNED

    def set_up(self, device: Device) -> None:
        """Make the manager."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=self._direct)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def save(self, state: State, path: Path) -> Handle:
        """Stage and hand over; the manager's lock is held while it stages."""
        return _ManagedSave(self._manager.save(str(path), state), self._manager)

    def load(self, state: State, path: Path) -> State:
        """Load into ``state``."""
        return dict(self._manager.load(str(path), into=state))

    def finish(self) -> None:
        """Close the manager."""
        self._manager.close()


class _ManagedSave(PendingSave):
    """A save whose staging holds the lock that training takes for its update."""

    def __init__(self, written: Any, manager: Any) -> None:
        super().__init__(written)
        self._manager = manager

    def staged(self) -> None:
        """Wait for the lock."""
        with self._manager.lock():
            pass


def _accepts_unaligned(folder: Path) -> bool:
    """Return whether the file system accepts a write by ``O_DIRECT`` that fills no block.

    The library (0.1.1) falls back to buffered writes only where opening is refused; ext4 and XFS
    open such a file, and refuse the write.
    """
    path = folder / f"direct-{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return True
    try:
        return bool(os.write(descriptor, b"unaligned"))
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink()


STRATEGIES: tuple[Strategy, ...] = (
    TorchCheckpointing(direct=True),
    TorchCheckpointing(direct=False),
)
