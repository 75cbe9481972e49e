"""The benchmark of save strategies, from start to end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ckptool.commands.bench.cost import UNKNOWN, TrainingJob
from ckptool.commands.bench.isolated import isolated
from ckptool.commands.bench.launch import Emit, Task, launch
from ckptool.commands.bench.machine import (
    describe_machine,
    installed_version,
    list_versions,
    require_room,
)
from ckptool.commands.bench.processes import require_proportional_memory
from ckptool.commands.bench.report import BenchReport, Measured, Settings
from ckptool.commands.bench.save_folders import SaveFolder, save_folder
from ckptool.commands.bench.scratch import scratch
from ckptool.commands.bench.specs import TensorSpec, specs_like, specs_of_size, total
from ckptool.commands.bench.strategies import select_strategies
from ckptool.commands.bench.worker.device import Accelerators
from ckptool.commands.options.bench import STATE_SIZE, BenchOptions
from ckptool.engine.ranks import read_launch, read_number
from ckptool.errors import TransferError, Unsupported, UsageError

_CPU_RANKS = 2
_OLDEST_TORCH = (2, 9)
"""The first with ``torch.accelerator``'s memory and DCP's ``StagingOptions``."""

_BESIDE = 4.0, 30.0
"""Seconds of each strategy beside its saves, at least and at most: to start ranks, to train."""
_SLOWER = 5.0
"""How many times longer than a raw write a save, and the steps beside it, may well take."""
_LIBRARIES = ("torch_checkpointing", "nvidia-resiliency-ext")


class PreparedBench(Struct, frozen=True):
    """A benchmark that fits: its settings are known, nothing is written."""

    settings: Settings
    specs: list[TensorSpec]
    names: list[str]
    out: SaveFolder
    training: TrainingJob = UNKNOWN

    def run(self, progress: Emit = lambda event: None) -> BenchReport | None:
        """Measure; None on all torchrun ranks but the first.

        TransferError if nothing could be measured. All that was written or started is gone at
        the end, however that comes.
        """
        events: list[Mapping[str, Any]] = []

        def emit(event: Mapping[str, Any]) -> None:
            events.append(event)
            progress(event)

        launched = read_launch(os.environ)
        leads = launched is None or launched.rank == 0
        with scratch(self.out, leads=leads) as folders:
            launch(Task(self.settings, self.specs, self.names, folders), emit)
        return self._report(events) if leads else None

    def estimate(self, limits: Mapping[str, Any]) -> tuple[float, float] | None:
        """Return how many seconds all strategies take, at least and at most, by what was measured.

        Each also saves once while parameters change.
        """
        rate = limits.get("write") or limits.get("upload")
        if not rate:
            return None
        saving = (self.settings.repeat + 2) * self.settings.nbytes / rate
        least, most = _BESIDE
        count = len(self.names)
        return count * (least + saving), count * (most + _SLOWER * saving)

    def _report(self, events: Sequence[Mapping[str, Any]]) -> BenchReport:
        def reasons(kind: str) -> dict[str, str]:
            return {e["name"]: e["reason"] for e in events if e["event"] == kind}

        limits = next(event for event in events if event["event"] == "limits")
        failed = {"limits": limits["failure"]} if limits["failure"] else {}
        failed |= reasons("failed")
        results = [
            msgspec.convert(event, Measured) for event in events if event["event"] == "measured"
        ]
        if not results:
            whys = (failed | reasons("skipped")).items()
            lines = "\n".join(f"  - {name}: {reason}" for name, reason in whys)
            raise TransferError(f"nothing could be measured\n{lines}".rstrip())
        return BenchReport(
            settings=self.settings,
            machine=describe_machine(self.out),
            versions=list_versions("torch", "safetensors", "numpy", *_LIBRARIES, *self.out.clients),
            limits=limits["limits"] or {},
            results=tuple(results),
            skipped=reasons("skipped"),
            failed=failed,
            training=self.training,
        )


def prepare_bench(options: BenchOptions) -> PreparedBench:
    """Decide what is measured and where, and that it fits.

    Raises UsageError for an unknown strategy or two states, Unsupported without torch or room, and
    the errors of ``open_checkpoint`` for ``like``.
    """
    if options.like is not None and options.size is not None:
        raise UsageError("--like and --size cannot be combined")
    names = select_strategies(options.strategies)
    training = TrainingJob.of(options.step_time, options.interval, options.mtbf)
    out = save_folder(options.out, abort=options.abort)
    require_proportional_memory()
    _require_torch()
    checkpoint = options.like
    specs = specs_like(checkpoint) if checkpoint else specs_of_size(options.size or STATE_SIZE)
    devices = find_accelerators()
    ranks = _count_ranks(options.ranks, devices)
    require_room(out, total(specs), ranks, devices)
    settings = Settings(
        source=str(checkpoint) if checkpoint else "a llama-like model in fp32 with AdamW",
        nbytes=total(specs),
        tensors=len(specs),
        ranks=ranks,
        device=devices.type,
        repeat=options.repeat,
        folder=str(options.out.resolve()),
        abort=options.abort,
    )
    return PreparedBench(settings, specs, names, out, training)


def _require_torch() -> None:
    version = installed_version("torch")
    if version is None:
        raise Unsupported("the benchmark needs torch", hint="pip install 'ckptool[torch]'")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise Unsupported(
            f"the benchmark needs torch {oldest} or newer, {version} is installed",
            hint=f"pip install 'torch>={oldest}'",
        )


def find_accelerators() -> Accelerators:
    """Find the accelerators here, in another process: one that has asked can no longer fork.

    Unsupported if torch cannot tell.
    """
    ran = subprocess.run(
        isolated("ckptool.commands.bench.worker.device"), capture_output=True, check=False
    )
    try:
        return msgspec.json.decode(ran.stdout.rpartition(b"\n")[2], type=Accelerators)
    except msgspec.DecodeError:
        lines = ran.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Unsupported(
            f"torch cannot list the accelerators: {(lines or ['it printed nothing'])[-1]}",
            hint="CUDA_VISIBLE_DEVICES= measures on CPU ranks",
        ) from None


def _count_ranks(count: int | None, devices: Accelerators) -> int:
    """Return how many ranks train; Unsupported if this machine has too few devices for them."""
    launched = read_launch(os.environ)
    if launched is not None:
        ranks, local = launched.size, read_number(os.environ, "LOCAL_WORLD_SIZE")
        if count not in (None, ranks):
            raise Unsupported(f"--ranks {count}: torchrun started {ranks}")
    else:
        ranks = local = count or devices.count or _CPU_RANKS
    if devices.count and local > devices.count:
        raise Unsupported(
            f"{local} ranks: there are {devices.count} devices of type {devices.type}",
            hint=f"{devices.count} ranks; CUDA_VISIBLE_DEVICES= measures on CPU ranks",
        )
    return ranks
