"""``torch.distributed.checkpoint.async_save``: by thread or process, three stagings, plan cache.

``StagingOptions`` and ``AsyncCheckpointerType`` are torch's from 2.9 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ckptool.commands.bench.strategies.base import (
    Basis,
    Handle,
    Pending,
    Place,
    State,
    Strategy,
    why_not,
)
from ckptool.commands.bench.strategies.blocking import load_dcp
from ckptool.commands.bench.worker.device import Device

_PROCESS, _THREAD = "process", "thread"
_DEFAULT, _PINNED, _ASYNC = "default", "pinned", "async"
_STAGINGS = {
    _DEFAULT: "default staging",
    _PINNED: "pinned staging",
    _ASYNC: "asynchronous staging",
}


@dataclass
class DcpAsync(Basis):
    """One combination of who writes, how is staged, and whether plans are kept."""

    writer: str
    staging: str
    cached: bool
    background = True
    to_urls = True

    def __post_init__(self) -> None:
        suffix = "+cached" if self.cached else ""
        self.name = f"dcp-async-{self.writer}/{self.staging}{suffix}"
        cache = " and cached plans" if self.cached else ""
        self.says = f"DCP's {self.writer} with {_STAGINGS[self.staging]}{cache}"
        self.must_wait = self.staging == _ASYNC
        self._stager: Any = None
        self._group: Any = None

    def unavailable(self, place: Place) -> str | None:
        """It needs torch's stagers, and shared memory for what another process shall see."""
        missing = why_not(_require_stagers)
        if missing or (self.writer == _THREAD and self.staging == _DEFAULT):
            return missing
        return place.lacks_shared_memory()

    def remark(self, place: Place) -> str | None:
        """torch pins through CUDA's runtime alone."""
        if self.staging == _DEFAULT or place.device.pins:
            return None
        return "staged in shared memory, not pinned: torch pins with CUDA alone"

    def set_up(self, device: Device) -> None:
        """The stager that all saves use, and a gloo group that training does not use."""
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
            return Pending(response.upload_completion, response.staging_completion)
        return Pending(response)

    def load(self, state: State, path: Path | str) -> State:
        """As DCP loads."""
        return load_dcp(state, path)

    def finish(self) -> None:
        """Close the stager; torch ends its process with the rank's."""
        if self._stager is not None:
            self._stager.close()


def _require_stagers() -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: F401


STRATEGIES: tuple[Strategy, ...] = tuple(
    DcpAsync(writer, staging, cached)
    for writer, staging, cached in product((_THREAD, _PROCESS), _STAGINGS, (False, True))
)
