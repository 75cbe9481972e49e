"""nvidia-resiliency-ext: ``FileSystemWriterAsync`` behind its queue of asynchronous calls.

Tried with 0.4.1, which writes each of a rank's ``thread_count`` files by a process that the worker
forks. Later ones also write by threads (``is_multiproc_io=False``), and their worker is a daemon,
which may not fork, unless told ``is_daemon=False``; these were read, not tried. Planning and the
metadata's commit are the loop's own work; a worker that stays, or one a save, writes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.commands.bench.machine import installed_version
from ckptool.commands.bench.strategies.base import Environment, Handle, State, Strategy
from ckptool.commands.bench.strategies.torch_savers import DcpStrategy
from ckptool.commands.bench.worker.device import Device


class Nvrx(DcpStrategy):
    """One combination of worker and file I/O."""

    library = "nvidia-resiliency-ext"
    background = True

    def __init__(self, *, persistent: bool, files: int, threaded: bool = False) -> None:
        worker = "persistent" if persistent else "worker-a-save"
        io = "multi-thread" if threaded else "multi-process" if files > 1 else "one-process"
        self.name = f"nvrx/{worker}+{io}"
        words = "persistent worker" if persistent else "worker per save"
        self.says = f"nvrx's {words} with {io} file I/O"
        self._persistent, self._files, self._threaded = persistent, files, threaded
        self._calls: Any = None
        self._device = Device("cpu", 0)

    @property
    def _io(self) -> dict[str, bool]:
        """The options that say how to write its files; nothing if it takes no such option."""
        return _known_options(_writer().__init__, is_multiproc_io=not self._threaded)

    def unavailable(self, environment: Environment) -> str | None:
        """Require the package, and what is asked of it."""
        version = installed_version(self.library)
        if version is None:
            return "nvidia-resiliency-ext is not installed (pip install 'ckptool[nvrx]')"
        if self._threaded and not self._io:
            return f"nvidia-resiliency-ext {version} writes files only from processes"
        if not self._persistent and environment.device.type != "cuda":
            return "its worker per save needs CUDA, which is not available"
        return None if environment.device.type == "cuda" else environment.lacks_shared_memory()

    def remark(self, environment: Environment) -> str | None:
        """Note what its staging is made for."""
        if environment.device.is_accelerator:
            return None
        return "it stages only device memory: on CPU ranks its worker writes live parameters"

    def set_up(self, device: Device) -> None:
        """Make the queue of calls; its worker starts with the first save."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        self._device = device
        daemon = _known_options(AsyncCallsQueue.__init__, is_daemon=self._threaded)
        self._calls = AsyncCallsQueue(persistent=self._persistent, **daemon)

    def save(self, state: State, path: Path) -> Handle:
        """Plan, then hand the write over."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        writer = _writer()(path, thread_count=self._files, **self._io)
        planned = save_state_dict_async_plan(state, writer, None, planner=DefaultSavePlanner())
        write, preload, arguments = writer.get_save_function_and_args()
        if preload is not None and self._device.type != "cuda":
            # where copies may overlap, which the last argument says, it ends in torch.cuda's calls
            preload = partial(preload.func, *preload.args[:-1], False)
        commit = partial(save_state_dict_async_finalize, *planned)
        self._calls.schedule_async_request(AsyncRequest(write, arguments, [commit], {}, preload))
        return _QueuedSave(self._calls)

    def finish(self) -> None:
        """End the worker that stays."""
        caller = self._calls.persistent_caller
        if caller is not None:
            caller.close()


class _QueuedSave(Handle):
    """A request in the queue. The loop's ranks agree by themselves when all are done."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self._over = False

    def done(self) -> bool:
        """Return whether this rank's worker is; it says so only once."""
        if not self._over:
            caller = self._calls.async_calls[0].async_caller
            self._over = caller.is_current_async_call_done(blocking=False, no_dist=True)
        return self._over

    def commit(self) -> float:
        """Gather what was written and write the metadata, all ranks together."""
        call = self._calls.async_calls.popleft()
        call.async_request.execute_finalize_fns(validate_matching_call_idx=False)
        return time.perf_counter()


def _writer() -> Any:
    from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async

    return filesystem_async.FileSystemWriterAsync


def _known_options(called: Callable[..., Any], **options: bool) -> dict[str, bool]:
    """Return those of the options that this version of the library knows."""
    parameters = inspect.signature(called).parameters
    return {name: value for name, value in options.items() if name in parameters}


STRATEGIES: tuple[Strategy, ...] = (
    Nvrx(persistent=True, files=2),
    Nvrx(persistent=True, files=1),
    Nvrx(persistent=True, files=2, threaded=True),
    Nvrx(persistent=False, files=2),
    Nvrx(persistent=False, files=2, threaded=True),
)
