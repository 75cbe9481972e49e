"""torch's ``_experimental`` checkpointers, made by their builders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptool.commands.bench.strategies.base import (
    Basis,
    Handle,
    Pending,
    Place,
    State,
    Strategy,
    Written,
    why_not,
)
from ckptool.commands.bench.worker.device import Device


class ExperimentalSync(Basis):
    """``make_sync_checkpointer``: a file a rank, and a barrier of this strategy's own."""

    name = "experimental-sync"
    says = "torch's experimental synchronous checkpointer"

    def __init__(self) -> None:
        self._checkpointer: Any = None

    def unavailable(self, place: Place) -> str | None:
        """It came with torch 2.9."""
        return why_not(_require_builders)

    def set_up(self, device: Device) -> None:
        """Build it without its barrier, which wants a port of its own."""
        from torch.distributed.checkpoint import _experimental as library

        config = library.CheckpointerConfig(barrier_config=library.BarrierConfig(barrier_type=None))
        self._checkpointer = library.make_sync_checkpointer(config)

    def save(self, state: State, path: Path) -> Handle:
        """Write this rank's file; then wait for the others."""
        import torch.distributed as dist

        self._checkpointer.save(str(path), state)
        dist.barrier()
        return Written()

    def load(self, state: State, path: Path) -> State:
        """This rank's own file, whole."""
        loaded: State = self._checkpointer.load(str(path))
        return loaded

    def finish(self) -> None:
        """Close it."""
        self._checkpointer.close()


class ExperimentalAsync(ExperimentalSync):
    """``make_async_checkpointer``: staged in the background, written by another process."""

    name = "experimental-async"
    says = "torch's experimental asynchronous checkpointer"
    background = True
    must_wait = True

    def unavailable(self, place: Place) -> str | None:
        """It stages in shared memory."""
        return why_not(_require_builders) or place.lacks_shared_memory()

    def remark(self, place: Place) -> str | None:
        """torch pins through CUDA's runtime alone."""
        if place.device.pins:
            return None
        return "staged in shared memory, not pinned: torch pins with CUDA alone"

    def set_up(self, device: Device) -> None:
        """Build it with all its staging can do here."""
        from torch.distributed.checkpoint import _experimental as library

        staging = library.CheckpointStagerConfig(
            use_pinned_memory=device.pins, use_non_blocking_copy=device.is_accelerator
        )
        config = library.CheckpointerConfig(staging_config=staging)
        self._checkpointer = library.make_async_checkpointer(config)

    def save(self, state: State, path: Path) -> Handle:
        """Stage and hand over."""
        staging, written = self._checkpointer.save(str(path), state)
        return Pending(written, staging)


def _require_builders() -> None:
    from torch.distributed.checkpoint._experimental import make_async_checkpointer  # noqa: F401


STRATEGIES: tuple[Strategy, ...] = (ExperimentalSync(), ExperimentalAsync())
