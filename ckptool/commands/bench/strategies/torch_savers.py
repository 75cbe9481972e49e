"""torch's own ways to save: ``torch.save``, and DCP's saves.

``StagingOptions`` and ``AsyncCheckpointerType`` of ``torch.distributed.checkpoint`` are there from
torch 2.9 on.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ckptool.commands.bench.strategies.base import Environment, Handle, PendingSave, State, Strategy
from ckptool.commands.bench.worker.device import Device


class TorchSave(Strategy):
    """A file per rank, ``checkpoint_{rank}.pt``, as torch's ``_experimental`` names them."""

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


class DcpStrategy(Strategy):
    """A way to write DCP's format."""

    def load(self, state: State, path: Path | str) -> State:
        """Load into ``state``, each rank its shards; torch reads URLs by fsspec."""
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state, checkpoint_id=path)
        return state


class DcpSync(DcpStrategy):
    """DCP's synchronous save, with its defaults."""

    name = "dcp-sync"
    says = "DCP's synchronous save"
    to_urls = True

    def save(self, state: State, path: Path | str) -> Handle:
        """Plan together, write, commit the metadata; torch writes to URLs by fsspec."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=path)
        return Handle()


_PROCESS, _THREAD = "process", "thread"
_DEFAULT, _PINNED, _ASYNC = "default", "pinned", "async"
_STAGINGS = {
    _DEFAULT: "default staging",
    _PINNED: "pinned staging",
    _ASYNC: "asynchronous staging",
}

_OWN_STAGERS = "this torch's stager ends with each save: each save has its own"


class DcpAsync(DcpStrategy):
    """``async_save`` with one combination of who writes, how is staged, and if plans are kept."""

    background = to_urls = True

    def __init__(self, writer: str, staging: str, cached: bool) -> None:
        self.name = f"dcp-async-{writer}/{staging}" + ("+cached" if cached else "")
        cache = " and cached plans" if cached else ""
        self.says = f"DCP's {writer} with {_STAGINGS[staging]}{cache}"
        self.must_wait = staging == _ASYNC
        self.pins = staging != _DEFAULT
        self.shares = self.pins or writer == _PROCESS
        self._writer, self._staging, self._cached = writer, staging, cached
        self._device = Device("cpu", 0)
        self._stagers: list[Any] = []
        self._group: Any = None

    def remark(self, environment: Environment) -> str | None:
        """Say also if its stager serves one save only."""
        if self._staging == _DEFAULT or _stages_again():
            return super().remark(environment)
        words = [super().remark(environment), _OWN_STAGERS]
        return "; ".join(filter(None, words))

    def set_up(self, device: Device) -> None:
        """Make a gloo group that training does not use."""
        import torch.distributed as dist

        self._device = device
        self._group = dist.new_group(backend="gloo")

    def _stager(self) -> Any:
        """Return the stager of a save: that of the last one if it can; None for torch's default."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._staging == _DEFAULT:
            return None
        if not self._stagers or not _stages_again():
            options = StagingOptions(
                use_pinned_memory=self._device.pins,
                use_shared_memory=True,
                use_async_staging=self._staging == _ASYNC,
                use_non_blocking_copy=self._device.is_accelerator,
            )
            # those before it stay: torch 2.11 crashes once a thread that has staged is gone
            self._stagers.append(DefaultStager(options))
        return self._stagers[-1]

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
            planner=DefaultSavePlanner(enable_plan_caching=self._cached),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType(self._writer),
            async_stager=self._stager(),
        )
        if isinstance(response, AsyncSaveResponse):
            return PendingSave(response.upload_completion, response.staging_completion.result)
        return PendingSave(response)

    def finish(self) -> None:
        """Close the stagers; torch ends its process with the rank's."""
        for stager in self._stagers:
            stager.close()


@cache
def _stages_again() -> bool:
    """Return whether torch's stager serves more than one save: that of torch 2.11 closes itself."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(*4 * (False,)))
    stager.stage({})
    try:
        stager.stage({})
    except KeyError:
        return False
    return True


STRATEGIES: tuple[Strategy, ...] = (
    TorchSave(),
    DcpSync(),
    *(
        DcpAsync(writer, staging, cached)
        for writer, staging, cached in product((_THREAD, _PROCESS), _STAGINGS, (False, True))
    ),
)
