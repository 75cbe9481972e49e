"""The benchmark of save strategies, from start to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptool.commands.bench.cost import UNKNOWN, Training
from ckptool.commands.bench.files import (
    list_shared_memory,
    remove,
    require_savable,
    scratch,
    scratch_of_all,
    store_clients,
    unused_shared_memory,
)
from ckptool.commands.bench.launch import Emit, Meeting, Task, launch
from ckptool.commands.bench.machine import (
    describe_machine,
    installed_version,
    list_versions,
    require_room,
)
from ckptool.commands.bench.processes import require_proportional_memory
from ckptool.commands.bench.report import BenchReport, Measured, Settings
from ckptool.commands.bench.specs import TensorSpec, specs_like, specs_of_size, total
from ckptool.commands.bench.strategies import select_strategies
from ckptool.commands.bench.worker.device import Accelerators
from ckptool.commands.bench.worker.rank import find_accelerators, run_rank
from ckptool.commands.options.bench import STATE_SIZE, BenchOptions
from ckptool.engine.ranks import read_launch, read_number
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.url import Location, RemotePath

_CPU_RANKS = 2
_OLDEST_TORCH = (2, 9)
"""The first with ``torch.accelerator``'s memory and DCP's ``StagingOptions``."""

_LIBRARIES = ("torch_checkpointing", "nvidia-resiliency-ext")

Progress = Callable[[Mapping[str, Any]], None]
"""Called with events: ``event`` is begin, doing, measured, skipped, failed or limits."""


class PreparedBench(Struct, frozen=True):
    """A benchmark that fits: its settings are known, nothing is written."""

    settings: Settings
    specs: list[TensorSpec]
    names: list[str]
    out: Location
    training: Training = UNKNOWN

    def run(self, progress: Progress = lambda event: None) -> BenchReport | None:
        """Measure; None on all torchrun ranks but the first.

        TransferError if nothing could be measured. All that was written or started is gone at
        the end, however that comes.
        """
        events: list[dict[str, Any]] = []
        shared = list_shared_memory()

        def emit(event: dict[str, Any]) -> None:
            events.append(event)
            progress(event)

        try:
            first = self._run_ranks(emit)
        finally:
            for memory in unused_shared_memory(shared):
                remove(memory)
        return self._report(events) if first else None

    def _run_ranks(self, emit: Emit) -> bool:
        """Have all ranks do the task; return whether this process is the one that reports."""
        if read_launch(os.environ) is None:
            with scratch(self.out) as folders:
                launch(Task(self.settings, self.specs, self.names, folders), emit)
            return True
        meeting = Meeting()
        with scratch_of_all(self.out, meeting) as folders:
            run_rank(Task(self.settings, self.specs, self.names, folders), meeting, emit)
        return meeting.rank == 0

    def _report(self, events: Sequence[Mapping[str, Any]]) -> BenchReport:
        def reasons(kind: str) -> dict[str, str]:
            return {e["name"]: e["reason"] for e in events if e["event"] == kind}

        limits = next(event for event in events if event["event"] == "limits")
        failed = {"limits": limits["failure"]} if limits["failure"] else {}
        failed |= reasons("failed")
        results = [Measured.of_event(event) for event in events if event["event"] == "measured"]
        if not results:
            whys = (failed | reasons("skipped")).items()
            lines = "\n".join(f"  - {name}: {reason}" for name, reason in whys)
            raise TransferError(f"nothing could be measured\n{lines}".rstrip())
        clients = () if isinstance(self.out, Path) else store_clients(self.out)
        return BenchReport(
            settings=self.settings,
            machine=describe_machine(self.out),
            versions=list_versions("torch", "safetensors", "numpy", *_LIBRARIES, *clients),
            limits=limits["limits"] or {},
            results=tuple(results),
            skipped=reasons("skipped"),
            failed=failed,
            training=self.training,
        )


def prepare_bench(options: BenchOptions) -> PreparedBench:
    """Decide what is measured and where, and that it fits.

    Raises UsageError for an unknown strategy, Unsupported without torch or room, and the errors of
    ``open_checkpoint`` for ``like``.
    """
    names = select_strategies(options.strategies)
    training = Training.of(options.step_time, options.interval, options.mtbf)
    if isinstance(options.out, RemotePath):
        require_savable(options.out, abort=options.abort)
    require_proportional_memory()
    _require_torch()
    like = options.like
    specs = specs_like(like) if like else specs_of_size(options.size or STATE_SIZE)
    devices = find_accelerators()
    ranks = _count_ranks(options.ranks, devices)
    require_room(options.out, total(specs), ranks, devices)
    settings = Settings(
        source=str(like) if like else "a llama-like model in fp32 with AdamW",
        nbytes=total(specs),
        tensors=len(specs),
        ranks=ranks,
        device=devices.type,
        repeat=options.repeat,
        folder=str(options.out.resolve()),
        abort=options.abort,
    )
    return PreparedBench(settings, specs, names, options.out.resolve(), training)


def _require_torch() -> None:
    version = installed_version("torch")
    if version is None:
        raise Unsupported("the benchmark needs torch", hint="pip install 'ckptool[torch]'")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TORCH:
        wanted = ".".join(map(str, _OLDEST_TORCH))
        raise Unsupported(
            f"the benchmark needs torch {wanted} or newer, {version} is installed",
            hint=f"pip install 'torch>={wanted}'",
        )


def _count_ranks(asked: int | None, devices: Accelerators) -> int:
    """Return how many ranks train; Unsupported if this machine has too few devices for them."""
    launched = read_launch(os.environ)
    if launched is not None:
        ranks, local = launched.size, read_number(os.environ, "LOCAL_WORLD_SIZE")
        if asked not in (None, ranks):
            raise Unsupported(f"--ranks {asked}: torchrun started {ranks}")
    else:
        ranks = local = asked or devices.count or _CPU_RANKS
    if devices.count and local > devices.count:
        raise Unsupported(
            f"{local} ranks: there are {devices.count} devices of type {devices.type}",
            hint=f"{devices.count} ranks; CUDA_VISIBLE_DEVICES= measures on CPU ranks",
        )
    return ranks
