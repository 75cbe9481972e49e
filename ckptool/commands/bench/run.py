"""The benchmark of save strategies, from start to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool.commands.bench.files import (
    Folders,
    left_shared,
    remove,
    scratch,
    scratch_of_all,
    shared_entries,
)
from ckptool.commands.bench.fork_server import require_proc
from ckptool.commands.bench.launch import WorkerEvents, launch
from ckptool.commands.bench.limits import require_room
from ckptool.commands.bench.report import BenchReport, Settings
from ckptool.commands.bench.specs import Task, TensorSpec, as_in, by_size, total
from ckptool.commands.bench.store import Meeting, clients, require_savable
from ckptool.commands.bench.strategies import chosen
from ckptool.commands.bench.strategies.base import version
from ckptool.commands.bench.transfer.machine import machine, versions
from ckptool.commands.bench.worker.device import Accelerators
from ckptool.commands.bench.worker.rank import Emit, accelerators_here, run_rank
from ckptool.commands.options.bench import STATE_SIZE, BenchOptions
from ckptool.engine.ranks import read_launch, read_number
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.url import Location, RemotePath

_CPU_RANKS = 2
_OLDEST_TORCH = (2, 9)
"""The first with ``torch.accelerator``'s memory and DCP's ``StagingOptions``."""

_LIBRARIES = ("torch_checkpointing", "nvidia-resiliency-ext")

Progress = Callable[[Mapping[str, Any]], None]
"""Is told what happens: ``event`` is begin, doing, measured, left-out, failed or limits."""


@dataclass(frozen=True, slots=True)
class PreparedBench:
    """A benchmark that will fit: its settings are known, nothing is written."""

    settings: Settings
    specs: list[TensorSpec]
    names: list[str]
    out: Location

    def run(self, progress: Progress = lambda event: None) -> BenchReport | None:
        """Measure; None on all torchrun ranks but the first.

        TransferError where nothing could be measured. All that was written or started is gone at
        the end, however that comes.
        """
        events, shared = WorkerEvents(), shared_entries()

        def emit(event: dict[str, Any]) -> None:
            events.add(event)
            progress(event)

        try:
            first = self._ranks(emit)
        finally:
            for left in left_shared(shared):
                remove(left)
        return self._report(events) if first else None

    def _ranks(self, emit: Emit) -> bool:
        """Have all ranks do the task; whether this process is the one that reports."""
        if _under_torchrun():
            meeting = Meeting()
            with scratch_of_all(self.out, meeting) as folders:
                run_rank(self._task(folders), meeting, emit)
            return meeting.rank == 0
        with scratch(self.out) as folders:
            launch(self._task(folders), self.settings.ranks, emit)
        return True

    def _task(self, folders: Folders) -> Task:
        told = self.settings
        saves = told.repeat + 1
        return Task(self.specs, self.names, saves, told.abort, told.device, *folders)

    def _report(self, events: WorkerEvents) -> BenchReport:
        if not events.results:
            reasons = (events.failed | events.left_out).items()
            lines = "\n".join(f"  - {name}: {reason}" for name, reason in reasons)
            raise TransferError(f"nothing could be measured\n{lines}".rstrip())
        told = _LIBRARIES if isinstance(self.out, Path) else (*_LIBRARIES, *clients(self.out))
        libraries = {name: found for name in told if (found := version(name))}
        return BenchReport(
            settings=self.settings,
            machine=machine(self.out),
            versions={k: v for k, v in versions().items() if k != "cp"} | libraries,
            limits=events.limits,
            results=tuple(events.results),
            left_out=events.left_out,
            failed=events.failed,
        )


def prepare_bench(options: BenchOptions) -> PreparedBench:
    """Settle what is measured and where, and that it will fit.

    Raises UsageError for a strategy that is none, Unsupported without torch or room, and what
    ``open_checkpoint`` raises for ``like``.
    """
    names = chosen(options.strategies)
    if isinstance(options.out, RemotePath):
        require_savable(options.out, abort=options.abort)
    require_proc()
    _require_torch()
    specs = as_in(options.like) if options.like else by_size(options.size or STATE_SIZE)
    here = accelerators_here()
    ranks = _ranks(options.ranks, here)
    require_room(options.out, total(specs), ranks, here)
    settings = Settings(
        source=str(options.like) if options.like else "a llama-like model in fp32 with AdamW",
        nbytes=total(specs),
        tensors=len(specs),
        ranks=ranks,
        device=here.type,
        repeat=options.repeat,
        folder=str(options.out.resolve()),
        abort=options.abort,
    )
    return PreparedBench(settings, specs, names, options.out.resolve())


def _under_torchrun() -> bool:
    return read_launch(os.environ) is not None


def _require_torch() -> None:
    found = version("torch")
    if found is None:
        raise Unsupported("the benchmark needs torch", hint="pip install 'ckptool[torch]'")
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST_TORCH:
        wanted = ".".join(map(str, _OLDEST_TORCH))
        raise Unsupported(
            f"the benchmark needs torch {wanted} or newer, {found} is here",
            hint=f"pip install 'torch>={wanted}'",
        )


def _ranks(asked: int | None, here: Accelerators) -> int:
    """How many ranks train; Unsupported where this machine has too few devices for its own."""
    if _under_torchrun():
        ranks, local = (read_number(os.environ, n) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if asked not in (None, ranks):
            raise Unsupported(f"--ranks {asked}: torchrun started {ranks}")
    else:
        ranks = local = asked or here.count or _CPU_RANKS
    if here.count and local > here.count:
        raise Unsupported(
            f"{local} ranks: there are {here.count} devices of type {here.type}",
            hint=f"{here.count} ranks; CUDA_VISIBLE_DEVICES= measures on CPU ranks",
        )
    return ranks
