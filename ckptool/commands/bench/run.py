"""The benchmark of save strategies, from start to end."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool.commands.bench.files import left_shared, remove, shared_entries
from ckptool.commands.bench.heard import Heard
from ckptool.commands.bench.launch import launch
from ckptool.commands.bench.processes import require_proc
from ckptool.commands.bench.rank import Emit, device_here, run_rank
from ckptool.commands.bench.report import BenchReport, Settings
from ckptool.commands.bench.room import require_room
from ckptool.commands.bench.specs import TensorSpec, as_in, by_size, total
from ckptool.commands.bench.store import Meeting
from ckptool.commands.bench.strategies import chosen
from ckptool.commands.bench.strategies.base import version
from ckptool.commands.bench.task import Task
from ckptool.commands.bench_machine import machine, versions
from ckptool.errors import CannotDo, TransferError

_CPU_RANKS = 2
_LIBRARIES = ("torch_checkpointing", "nvidia-resiliency-ext")

Progress = Callable[[Mapping[str, Any]], None]
"""Is told what happens: ``event`` is begin, doing, measured, left-out, failed or limits."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure: state of ``size`` bytes or of the shape of ``like``, written below ``out``.

    ``ranks`` None: one an accelerator; without any, two on the CPU. ``repeat`` steady saves follow
    the first. ``abort``: also kill each strategy in mid-save.
    """

    size: int
    like: Path | None = None
    out: Path = Path()
    strategies: tuple[str, ...] = ()
    ranks: int | None = None
    repeat: int = 5
    abort: bool = False


@dataclass(frozen=True, slots=True)
class PreparedBench:
    """A benchmark that will fit: its settings are known, nothing is written."""

    settings: Settings
    specs: list[TensorSpec]
    names: list[str]

    def run(self, progress: Progress = lambda event: None) -> BenchReport | None:
        """Measure; None on all torchrun ranks but the first.

        TransferError where nothing could be measured. All that was written or started is gone at
        the end, however that comes.
        """
        heard, shared = Heard(), shared_entries()

        def emit(event: dict[str, Any]) -> None:
            heard.hear(event)
            progress(event)

        try:
            first = self._ranks(emit)
        finally:
            for left in left_shared(shared):
                remove(left)
        return self._report(heard) if first else None

    def _ranks(self, emit: Emit) -> bool:
        """Have all ranks do the task; whether this process is the one that reports."""
        if _under_torchrun():
            meeting = Meeting()
            with _scratch_of_all(self.settings.folder, meeting) as folders:
                run_rank(self._task(folders), meeting, emit)
            return meeting.rank == 0
        with _scratch(self.settings.folder) as folders:
            launch(self._task(folders), self.settings.ranks, emit)
        return True

    def _task(self, folders: list[str]) -> Task:
        told = self.settings
        scratch, temporary = folders
        saves = told.repeat + 1
        return Task(self.specs, self.names, saves, told.abort, told.device, scratch, temporary)

    def _report(self, heard: Heard) -> BenchReport:
        if not heard.results:
            reasons = (heard.failed | heard.left_out).items()
            told = "\n".join(f"  - {name}: {reason}" for name, reason in reasons)
            raise TransferError(f"nothing could be measured\n{told}".rstrip())
        libraries = {name: found for name in _LIBRARIES if (found := version(name))}
        return BenchReport(
            settings=self.settings,
            machine=machine(Path(self.settings.folder)),
            versions={k: v for k, v in versions().items() if k != "cp"} | libraries,
            limits=heard.limits,
            results=tuple(heard.results),
            left_out=heard.left_out,
            failed=heard.failed,
        )


def prepare_bench(options: BenchOptions) -> PreparedBench:
    """Settle what is measured and where, and that it will fit.

    Raises UsageError for a strategy that is none, CannotDo without torch or room, and what
    ``open_checkpoint`` raises for ``like``.
    """
    names = chosen(options.strategies)
    require_proc()
    if importlib.util.find_spec("torch") is None:
        raise CannotDo("the benchmark needs torch", hint="pip install 'ckptool[torch]'")
    specs = as_in(options.like) if options.like else by_size(options.size)
    ranks, device = _ranks_and_device(options.ranks)
    require_room(options.out, total(specs), ranks, device)
    settings = Settings(
        source=str(options.like) if options.like else "a llama-like model in fp32 with AdamW",
        nbytes=total(specs),
        tensors=len(specs),
        ranks=ranks,
        device=device,
        repeat=options.repeat,
        folder=str(options.out.resolve()),
        abort=options.abort,
    )
    return PreparedBench(settings, specs, names)


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _ranks_and_device(asked: int | None) -> tuple[int, str]:
    """How many ranks train, and on what type of device; CannotDo where there are too few."""
    device, count = device_here()
    if _under_torchrun():
        there, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if asked not in (None, there):
            raise CannotDo(f"--ranks {asked}: torchrun started {there}")
        return there, device if count >= here else "cpu"
    ranks = asked or count or _CPU_RANKS
    if count and ranks > count:
        raise CannotDo(
            f"--ranks {ranks}: there are {count} devices of type {device}",
            hint=f"--ranks {count}; CUDA_VISIBLE_DEVICES= measures on CPU ranks",
        )
    return ranks, device


@contextmanager
def _scratch(out: str) -> Iterator[list[str]]:
    """A folder to write checkpoints in and one for temporary files, both removed at the end."""
    # sockets lie among the temporary files, and their paths must be short
    folders = [tempfile.mkdtemp(prefix="ckptool-", dir=place) for place in (out, None)]
    try:
        (Path(folders[0]) / "logs").mkdir()
        yield folders
    finally:
        for folder in folders:
            remove(Path(folder))


@contextmanager
def _scratch_of_all(out: str, meeting: Meeting) -> Iterator[list[str]]:
    """Rank 0's scratch folders, for every rank."""
    if meeting.rank:
        folders = meeting.gather(None)[0]
        Path(folders[1]).mkdir(exist_ok=True)  # each node has its own
        yield folders
        meeting.gather(None)
        remove(Path(folders[1]))
        return
    with _scratch(out) as folders:
        yield meeting.gather(folders)[0]
        meeting.gather(None)
