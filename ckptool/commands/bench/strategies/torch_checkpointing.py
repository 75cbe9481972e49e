"""The torch_checkpointing package (0.1): its ``CheckpointManager``, which saves asynchronously."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptool.commands.bench.machine import installed_version
from ckptool.commands.bench.strategies.base import Environment, Handle, PendingSave, State, Strategy
from ckptool.commands.bench.worker.device import Device


class TorchCheckpointing(Strategy):
    """The manager's defaults, with or without ``O_DIRECT``."""

    library = "torch_checkpointing"
    background = must_wait = shares = pins = True

    def __init__(self, *, direct: bool) -> None:
        variant = "direct" if direct else "buffered"
        self.name = f"torch-checkpointing/{variant}"
        self.says = f"torch_checkpointing with {variant} I/O"
        self._direct = direct
        self._manager: Any = None

    def unavailable(self, environment: Environment) -> str | None:
        """Require the package, and shared memory to stage in."""
        if installed_version(self.library) is None:
            return "torch_checkpointing is not installed (pip install torch-checkpointing)"
        if self._direct and not _accepts_unaligned(environment.folder):
            return "it writes unaligned pieces with O_DIRECT, which the file system here refuses"
        return super().unavailable(environment)

    def set_up(self, device: Device) -> None:
        """Make the manager."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=self._direct)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def save(self, state: State, path: Path) -> Handle:
        """Stage and hand over; the manager's lock is held while it stages."""

        def wait() -> None:
            with self._manager.lock():
                pass

        return PendingSave(self._manager.save(str(path), state), wait)

    def load(self, state: State, path: Path) -> State:
        """Load into ``state``."""
        return dict(self._manager.load(str(path), into=state))

    def finish(self) -> None:
        """Close the manager."""
        self._manager.close()


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
