"""Train and save with one strategy: what a fresh process of every rank does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ckptool.commands.bench.files import make_durable, remove, usage
from ckptool.commands.bench.store import named
from ckptool.commands.bench.strategies.base import Handle, Strategy
from ckptool.commands.bench.worker.consistency import check_consistency
from ckptool.commands.bench.worker.training import Training
from ckptool.storage.url import Location

STEPS_BEFORE = 6

Tell = Callable[[str, Any], None]
"""Says something to the process that watches: a word and what belongs to it."""


@dataclass(slots=True)
class Clocked:
    """What one rank measured: seconds, and bytes of device memory above what training needs.

    ``during`` has a list a save. ``synced`` is what fsync took.
    """

    blocked: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    during: list[list[float]] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    device_peak: int = 0


def measure(
    strategy: Strategy, training: Training, folder: Location, saves: int, tell: Tell
) -> dict[str, Any]:
    """Save ``saves`` times within a step loop, then check what is saved; all ranks together.

    The values of all ranks: times are those of the slowest, for it holds up the others.
    """
    clocked = Clocked()
    base = _steps_before(training, clocked, tell)
    # not sooner: what some libraries start here would slow the steps before the first save
    strategy.set_up(training.device)
    try:
        disk = _saves(strategy, training, folder, saves, clocked, tell)
        clocked.device_peak = max(0, training.device.peak() - base)
        tell("checking", None)
        found = check_consistency(strategy, training, folder / "checked")
    finally:
        strategy.finish()
    return {**_slowest(clocked), **disk, "consistency": asdict(found)}


def _steps_before(training: Training, clocked: Clocked, tell: Tell) -> int:
    """Train without any save; the bytes of device memory that it needs at most."""
    training.device.forget_peak()
    training.step()
    tell("training", None)
    clocked.before += [training.step()[0] for _ in range(STEPS_BEFORE)]
    base = training.device.peak()
    training.device.forget_peak()
    return base


def _saves(
    strategy: Strategy,
    training: Training,
    folder: Location,
    saves: int,
    clocked: Clocked,
    tell: Tell,
) -> dict[str, Any]:
    """Save and train; what the last save left there."""
    disk: dict[str, Any] = {}
    for number in range(saves):
        tell("save", number)
        path = folder / f"save-{number}"
        _one_save(strategy, training, path, clocked)
        clocked.after.append(training.step()[0])
        disk = usage(path)
        _together(partial(remove, path))
    return disk


def _one_save(strategy: Strategy, training: Training, path: Location, clocked: Clocked) -> None:
    """Save once, and train until every rank's bytes are written; then make them durable."""
    import torch.distributed as dist

    training.device.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    handle = strategy.save(training.state, named(path))
    handle.staged()
    training.device.synchronize_stream()
    blocked = time.perf_counter() - begin
    clocked.during.append(_train_until_done(training, handle) if strategy.background else [])
    commit = time.perf_counter()
    ended = handle.commit()
    blocked += time.perf_counter() - commit if strategy.background else 0.0
    syncing = time.perf_counter()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        make_durable(path)
    clocked.synced.append(time.perf_counter() - syncing)
    clocked.blocked.append(blocked)
    clocked.written.append(ended - begin)


def _train_until_done(training: Training, handle: Handle) -> list[float]:
    """The steps that ran beside the save; the one in which all ranks were done is none of them."""
    steps: list[float] = []
    while True:
        seconds, agreed = training.step(handle.done())
        if agreed:
            return steps
        steps.append(seconds)


def _together(work: Callable[[], None]) -> None:
    """Rank 0 works, when all ranks are there; all go on when it is done."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def _slowest(clocked: Clocked) -> dict[str, Any]:
    """The values of all ranks, save by save the largest; steps are in lockstep, so rank 0's.

    It is durable when the last rank has written, and the slowest fsync after that is done.
    """
    import torch.distributed as dist

    ranks: list[Clocked] = [clocked] * dist.get_world_size()
    dist.all_gather_object(ranks, clocked)
    first = asdict(ranks[0])
    for name in ("blocked", "written", "synced"):
        values = [getattr(rank, name) for rank in ranks]
        first[name] = [max(save) for save in zip(*values, strict=True)]
    durable = [sum(save) for save in zip(first["written"], first.pop("synced"), strict=True)]
    device_peak = max(rank.device_peak for rank in ranks)
    return {**first, "durable": durable, "device_peak": device_peak}
