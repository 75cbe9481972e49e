"""The checkpointers of ``torch.distributed.checkpoint._experimental``, and what follows them.

torch is to remove them for the package torch_checkpointing (pytorch/pytorch#195683, open in
September 2026; torch 2.9 to 2.15 have them). Where they are gone, its builders make the savers.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.commands.bench.machine import installed_version
from ckptool.commands.bench.strategies.base import Environment, Handle, PendingSave, State, Strategy
from ckptool.commands.bench.worker.device import Device

_LEAVING = "torch is to remove it (pytorch/pytorch#195683): torch_checkpointing follows"
_FOLLOWED = "this torch has it no more: torch_checkpointing's builders made it"
_MODULE, _PACKAGE = "torch.distributed.checkpoint._experimental", "torch_checkpointing"


class Experimental(Strategy):
    """A checkpointer of ``_experimental``: a file per rank, at once or in the background."""

    def __init__(self, *, background: bool) -> None:
        self.name = "experimental-async" if background else "experimental-sync"
        kind = "asynchronous" if background else "synchronous"
        self.says = f"torch's experimental {kind} checkpointer"
        self.background = self.must_wait = self.shares = self.pins = background
        self._checkpointer: Any = None

    def unavailable(self, environment: Environment) -> str | None:
        """Require torch's builders or those that follow, and shared memory to stage in."""
        try:
            is_gone = import_experimental() is None
        except Exception as error:  # noqa: BLE001 (a library that cannot be used is a reason)
            return (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if is_gone and installed_version(_PACKAGE) is None:
            return f"this torch has it no more, and {_PACKAGE} is not installed"
        return super().unavailable(environment)

    def remark(self, environment: Environment) -> str | None:
        """Say that it leaves torch, or has left."""
        leaving = _FOLLOWED if import_experimental() is None else _LEAVING
        return "; ".join(filter(None, (super().remark(environment), leaving)))

    def set_up(self, device: Device) -> None:
        """Build it: without its barrier, which wants a port of its own; with all staging can do."""
        library = import_experimental()
        if library is None:
            self._checkpointer = _Follower(device, background=self.background)
        elif self.background:
            staging = library.CheckpointStagerConfig(**_staging(device))
            config = library.CheckpointerConfig(staging_config=staging)
            self._checkpointer = library.make_async_checkpointer(config)
        else:
            barrier = library.BarrierConfig(barrier_type=None)
            config = library.CheckpointerConfig(barrier_config=barrier)
            self._checkpointer = library.make_sync_checkpointer(config)

    def save(self, state: State, path: Path) -> Handle:
        """Write this rank's file and wait for the others; or stage, and hand over."""
        import torch.distributed as dist

        saved = self._checkpointer.save(str(path), state)
        if self.background:
            staging, written = saved
            return PendingSave(written, staging.result)
        dist.barrier()
        return Handle()

    def load(self, state: State, path: Path) -> State:
        """Load this rank's own files, whole; those that follow load into ``state``."""
        words = (state,) if isinstance(self._checkpointer, _Follower) else ()
        loaded: State = self._checkpointer.load(str(path), *words)
        return loaded

    def finish(self) -> None:
        """Close it."""
        self._checkpointer.close()


def import_experimental() -> Any:
    """Return torch's package, or None where torch has none."""
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name == _MODULE:
            return None
        raise


def _staging(device: Device) -> dict[str, bool]:
    return {"use_pinned_memory": device.pins, "use_non_blocking_copy": device.is_accelerator}


class _Follower:
    """A saver and a loader of torch_checkpointing (0.1.1), called as torch's checkpointers are."""

    def __init__(self, device: Device, *, background: bool) -> None:
        import torch.distributed as dist
        import torch_checkpointing as library
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        if background:
            staging = library.CheckpointStagerConfig(**_staging(device))
            config = library.AsyncCheckpointSaverConfig(staging_config=staging)
            make = partial(library.make_async_checkpoint_saver, config)
        else:
            make = library.make_sync_checkpoint_saver
        self._saver = make(storage_config=storage)
        rank, size = dist.get_rank(), dist.get_world_size()
        info = library.RankInfo(rank, size, rank, size)
        reader = library.CheckpointReader(rank_info=info, storage_config=storage)
        self._loader = library.CheckpointLoader(reader=reader)

    def save(self, path: str, state: State) -> Any:
        return self._saver.save(path, _items_of(state))

    def load(self, path: str, state: State) -> State:
        self._loader.load(path, _items_of(state))
        return state

    def close(self) -> None:
        self._saver.close()
        self._loader.close()


def _items_of(state: State) -> Any:
    """Return a state dict as torch_checkpointing takes it: each of its first keys is an item."""
    from torch_checkpointing import CheckpointBase, CheckpointItem

    class Items(CheckpointBase):  # type: ignore[misc]
        """The items; what is loaded replaces them."""

        def get_items(self) -> dict[str, Any]:
            return {key: CheckpointItem(value) for key, value in state.items()}

        def load_state_dict(self, loaded: dict[str, Any]) -> None:
            state.update(loaded)

    return Items()


STRATEGIES: tuple[Strategy, ...] = (
    Experimental(background=False),
    Experimental(background=True),
)
