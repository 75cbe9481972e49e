"""nvidia-resiliency-ext: ``FileSystemWriterAsync`` behind its queue of asynchronous calls.

Read and tried with 0.4.1. Planning and the metadata's commit are the loop's own work; a worker that
stays, or one a save, writes. That worker forks a process a file (``thread_count`` files a rank).
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.commands.bench.device import Device
from ckptool.commands.bench.strategies.base import Basis, Place, State, Strategy, version
from ckptool.commands.bench.strategies.dcp import load_dcp

_THREADED = "write_preloaded_data_multithread"


class Nvrx(Basis):
    """One combination of worker and file I/O."""

    library = "nvidia-resiliency-ext"
    background = True

    def __init__(self, *, persistent: bool, files: int, threaded: bool = False) -> None:
        worker = "persistent" if persistent else "worker-a-save"
        io = "multi-thread" if threaded else "multi-process" if files > 1 else "one-process"
        self.name = f"nvrx/{worker}+{io}"
        self.says = f"nvrx's {worker.replace('-', ' ')} worker with {io} file I/O"
        self._persistent, self._files, self._threaded = persistent, files, threaded
        self._calls: Any = None
        self._device = Device("cpu", 0)

    def unavailable(self, place: Place) -> str | None:
        """It must be installed, and have what is asked of it."""
        found = version(self.library)
        if found is None:
            return "nvidia-resiliency-ext is not installed (pip install 'ckptool[nvrx]')"
        if self._threaded and not hasattr(_writer(), _THREADED):
            return f"nvidia-resiliency-ext {found} writes files by processes alone"
        if not self._persistent and place.device.type != "cuda":
            return "its worker a save waits for CUDA, which is not here"
        return None if place.device.type == "cuda" else place.lacks_shared_memory()

    def remark(self, place: Place) -> str | None:
        """What its staging is made for."""
        if place.device.is_accelerator:
            return None
        return "it stages device memory alone: on CPU ranks its worker writes live parameters"

    def set_up(self, device: Device) -> None:
        """The queue of calls; its worker starts with the first save."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        self._device = device
        self._calls = AsyncCallsQueue(persistent=self._persistent)

    def save(self, state: State, path: Path) -> Any:
        """Plan, then hand the write over."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        writer = _writer()(path, thread_count=self._files)
        planned = save_state_dict_async_plan(state, writer, None, planner=DefaultSavePlanner())
        write, preload, words = writer.get_save_function_and_args()
        if write is not None and self._threaded:
            write = partial(getattr(writer, _THREADED), *write.args)
        if preload is not None and self._device.type != "cuda":
            # the library's own staging ends in torch.cuda.synchronize() where copies may overlap
            preload = partial(writer.preload_tensors, writer.write_buckets, False)
        commit = partial(save_state_dict_async_finalize, *planned)
        self._calls.schedule_async_request(AsyncRequest(write, words, [commit], {}, preload))
        return _Queued(self._calls, agree=self._device.type == "cuda")

    def load(self, state: State, path: Path) -> State:
        """It writes DCP's format."""
        return load_dcp(state, path)

    def finish(self) -> None:
        """End the worker that stays."""
        caller = self._calls.persistent_caller
        if caller is not None:
            caller.close()


class _Queued:
    """A request in the queue. ``agree``: whether its ranks may agree, which they do by CUDA."""

    def __init__(self, calls: Any, *, agree: bool) -> None:
        self._calls, self._agree = calls, agree
        self._over = False

    def staged(self) -> None:
        """The call returned once it was staged."""

    def done(self) -> bool:
        """Whether this rank's worker is; it says so only once."""
        if not self._over:
            caller = self._calls.async_calls[0].async_caller
            self._over = caller.is_current_async_call_done(blocking=False, no_dist=True)
        return self._over

    def commit(self) -> float:
        """Gather what was written and write the metadata, all ranks together."""
        call = self._calls.async_calls.popleft()
        call.async_request.execute_finalize_fns(validate_matching_call_idx=self._agree)
        return time.perf_counter()


def _writer() -> Any:
    from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async

    return filesystem_async.FileSystemWriterAsync


STRATEGIES: tuple[Strategy, ...] = (
    Nvrx(persistent=True, files=2),
    Nvrx(persistent=True, files=1),
    Nvrx(persistent=True, files=2, threaded=True),
    Nvrx(persistent=False, files=2),
    Nvrx(persistent=False, files=2, threaded=True),
)
