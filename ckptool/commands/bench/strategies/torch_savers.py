"""torch's own ways to save: ``torch.save``, DCP's saves, and the ``_experimental`` checkpointers.

``StagingOptions`` and ``AsyncCheckpointerType`` of ``torch.distributed.checkpoint`` are there from
torch 2.9 on, as are the builders of ``_experimental``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ckptool.commands.bench.strategies.base import (
    NOT_PINNED,
    Handle,
    PendingSave,
    Place,
    State,
    Strategy,
    import_failure,
)
from ckptool.commands.bench.worker.device import Device

_CHECKPOINT = "torch.distributed.checkpoint"


class TorchSave(Strategy):
    """A file a rank, ``checkpoint_{rank}.pt``, as torch's ``_experimental`` names them."""

    name = "torch-save"
    says = "torch.save"

    def save(self, state: State, path: Path) -> Handle:
        """Write this rank's file; then wait for the others."""
        import torch
        import torch.distributed as dist

        path.mkdir(parents=True, exist_ok=True)
        torch.save(state, path / f"checkpoint_{dist.get_rank()}.pt")
        dist.barrier()
        return Handle()

    def load(self, state: State, path: Path) -> State:
        """Load this rank's own file."""
        import torch
        import torch.distributed as dist

        loaded: State = torch.load(path / f"checkpoint_{dist.get_rank()}.pt", weights_only=True)
        return loaded


class DcpSync(Strategy):
    """DCP's synchronous save, with its defaults."""

    name = "dcp-sync"
    says = "DCP's synchronous save"
    to_urls = True

    def save(self, state: State, path: Path | str) -> Handle:
        """Plan together, write, commit the metadata; torch writes to URLs by fsspec."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=path)
        return Handle()

    def load(self, state: State, path: Path | str) -> State:
        """Load into ``state``, each rank its shards."""
        return load_dcp(state, path)


def load_dcp(state: State, path: Path | str) -> State:
    """Load by ``torch.distributed.checkpoint`` into ``state``; torch reads URLs by fsspec."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, checkpoint_id=path)
    return state


_PROCESS, _THREAD = "process", "thread"
_DEFAULT, _PINNED, _ASYNC = "default", "pinned", "async"
_STAGINGS = {
    _DEFAULT: "default staging",
    _PINNED: "pinned staging",
    _ASYNC: "asynchronous staging",
}


@dataclass
class DcpAsync(DcpSync):
    """``async_save`` with one combination of who writes, how is staged, and if plans are kept."""

    writer: str
    staging: str
    cached: bool
    background = True

    def __post_init__(self) -> None:
        suffix = "+cached" if self.cached else ""
        self.name = f"dcp-async-{self.writer}/{self.staging}{suffix}"
        cache = " and cached plans" if self.cached else ""
        self.says = f"DCP's {self.writer} with {_STAGINGS[self.staging]}{cache}"
        self.must_wait = self.staging == _ASYNC
        self._stager: Any = None
        self._group: Any = None

    def unavailable(self, place: Place) -> str | None:
        """Require torch's stagers, and shared memory for what another process shall see."""
        missing = import_failure(f"{_CHECKPOINT}.staging", "StagingOptions")
        if missing or (self.writer == _THREAD and self.staging == _DEFAULT):
            return missing
        return place.lacks_shared_memory()

    def remark(self, place: Place) -> str | None:
        """Note staging that does not pin."""
        return None if self.staging == _DEFAULT or place.device.pins else NOT_PINNED

    def set_up(self, device: Device) -> None:
        """Make the stager that all saves use, and a gloo group that training does not use."""
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._group = dist.new_group(backend="gloo")
        if self.staging == _DEFAULT:
            return
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=device.pins,
                use_shared_memory=True,
                use_async_staging=self.staging == _ASYNC,
                use_non_blocking_copy=device.is_accelerator,
            )
        )

    def save(self, state: State, path: Path | str) -> Handle:
        """Stage, and leave the rest to the thread or process."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        response = async_save(
            state,
            checkpoint_id=path,
            planner=DefaultSavePlanner(enable_plan_caching=self.cached),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType(self.writer),
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            return PendingSave(response.upload_completion, response.staging_completion)
        return PendingSave(response)

    def finish(self) -> None:
        """Close the stager; torch ends its process with the rank's."""
        if self._stager is not None:
            self._stager.close()


class ExperimentalSync(Strategy):
    """``make_sync_checkpointer``: a file a rank, and a barrier of this strategy's own."""

    name = "experimental-sync"
    says = "torch's experimental synchronous checkpointer"

    def __init__(self) -> None:
        self._checkpointer: Any = None

    def unavailable(self, place: Place) -> str | None:
        """Require torch's builders, which came with 2.9."""
        return import_failure(f"{_CHECKPOINT}._experimental", "make_async_checkpointer")

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
        return Handle()

    def load(self, state: State, path: Path) -> State:
        """Load this rank's own file, whole."""
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
        """Require the builders, and shared memory to stage in."""
        return super().unavailable(place) or place.lacks_shared_memory()

    def remark(self, place: Place) -> str | None:
        """Note staging that does not pin."""
        return None if place.device.pins else NOT_PINNED

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
        return PendingSave(written, staging)


STRATEGIES: tuple[Strategy, ...] = (
    TorchSave(),
    DcpSync(),
    *(
        DcpAsync(writer, staging, cached)
        for writer, staging, cached in product((_THREAD, _PROCESS), _STAGINGS, (False, True))
    ),
    ExperimentalSync(),
    ExperimentalAsync(),
)
