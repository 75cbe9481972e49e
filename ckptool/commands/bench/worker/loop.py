"""Train and save with one strategy, and check what was saved, in a fresh process of every rank."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.bench.processes import Tell
from ckptool.commands.bench.save_folders import SaveFolder
from ckptool.commands.bench.strategies.base import Handle, Strategy
from ckptool.commands.bench.worker.consistency import check_consistency, remove_together
from ckptool.commands.bench.worker.device import Device, Memory, gather
from ckptool.commands.bench.worker.pulse import BESIDE, DONE
from ckptool.commands.bench.worker.training import Training

_STEPS_BEFORE = 6


class RankTimes(Struct):
    """What one rank measured: seconds, and the memory that saving needs above what training does.

    ``during`` has a list a save. ``synced`` is what fsync took, ``loaded`` what each load did.
    """

    blocked: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    during: list[list[float]] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    memory: Memory = Memory()
    most_used: int = 0

    def look(self, device: Device) -> None:
        """Take note of what is used on the device now: the context of a worker is gone later."""
        self.most_used = max(self.most_used, device.used_memory() or 0)


def measure(
    strategy: Strategy, training: Training, folder: SaveFolder, saves: int, tell: Tell
) -> dict[str, Any]:
    """Save ``saves`` times within a step loop, then check what is saved; all ranks together.

    Where the library wants its staging awaited, every other save awaits it late: before the next
    optimizer step. Returns the values of all ranks: times are the slowest's, for it holds up the
    others.
    """
    times, late = RankTimes(), RankTimes()
    sizes: dict[str, int] = {}
    base = _train_before(training, times, tell)
    late.before = times.before
    ways = [times, late] if strategy.must_wait else [times]
    # not sooner: what some libraries start here would slow the steps before the first save
    strategy.set_up(training.device)
    try:
        for number, way in product(range(saves), ways):
            tell("save", number)
            path = folder / f"save-{number}"
            _save(strategy, training, path, way, tell, late=way is late)
            way.after.append(training.step()[0])
            sizes = path.sizes()
            remove_together(path)
        peak = training.device.peak_memory()
        used = None if peak.used is None else max(peak.used, times.most_used, late.most_used)
        times.memory = replace(peak, used=used).above(base)
        tell("checking", None)
        consistency, times.loaded = check_consistency(strategy, training, folder, tell)
    finally:
        strategy.finish()
    disk = {"nbytes": sum(sizes.values()), "files": len(sizes), "names": list(sizes)}
    values = _slowest(times) | disk | {"consistency": msgspec.to_builtins(consistency)}
    return values | {"overlapped": _slowest(late)["blocked"] if strategy.must_wait else None}


def _train_before(training: Training, times: RankTimes, tell: Tell) -> Memory:
    """Train without any save; return the memory that it needs at most."""
    training.device.peak_memory(reset=True)
    training.step()
    tell("training", None)
    times.before += [training.step()[0] for _ in range(_STEPS_BEFORE)]
    return training.device.peak_memory(reset=True)


def _save(
    strategy: Strategy,
    training: Training,
    path: SaveFolder,
    times: RankTimes,
    tell: Tell,
    *,
    late: bool,
) -> None:
    """Save once, and train until every rank's bytes are written; then make them durable.

    With ``late``, the next forward and backward pass run beside the staging. What then is lost is
    how much longer the call and that step take than a step alone.
    """
    import torch.distributed as dist

    training.device.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    handle = strategy.save(training.state, path.target)
    if late:
        training.step(done=False, before_update=handle.staged)
        blocked = max(0.0, time.perf_counter() - begin - statistics.median(times.before))
    else:
        handle.staged()
        training.device.synchronize_stream()
        blocked = time.perf_counter() - begin
    look = partial(times.look, training.device)
    look()
    times.during.append(train_beside(handle, training, tell, look) if strategy.background else [])
    commit = time.perf_counter()
    ended = handle.commit()
    blocked += time.perf_counter() - commit if strategy.background else 0.0
    syncing = time.perf_counter()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        path.make_durable()
    times.synced.append(time.perf_counter() - syncing)
    times.blocked.append(blocked)
    times.written.append(ended - begin)


def train_beside(
    handle: Handle, training: Training, tell: Tell, look: Callable[[], None] = lambda: None
) -> list[float]:
    """Train until every rank's save is done; return the seconds of each step but the last.

    ``look`` is called between steps.
    """
    tell(BESIDE, os.getpid())
    steps: list[float] = []
    done = False
    while True:
        if not done and handle.done():
            done = True
            tell(DONE, None)
        seconds, agreed = training.step(done)
        if agreed:
            return steps
        steps.append(seconds)
        look()


def _slowest(times: RankTimes) -> dict[str, Any]:
    """Return the values of all ranks, save by save the largest; steps, in lockstep, are rank 0's.

    It is durable when the last rank has written, and the slowest fsync after that is done.
    """
    ranks = gather(times)

    def largest(name: str) -> list[float]:
        saves = zip(*(getattr(rank, name) for rank in ranks), strict=True)
        return [max(save) for save in saves]

    def most(name: str) -> int | None:
        values = [getattr(rank.memory, name) for rank in ranks]
        return max((nbytes for nbytes in values if nbytes is not None), default=None)

    written = largest("written")
    return {
        "before": ranks[0].before,
        "during": ranks[0].during,
        "after": ranks[0].after,
        "blocked": largest("blocked"),
        "written": written,
        "durable": [sum(save) for save in zip(written, largest("synced"), strict=True)],
        "loaded": largest("loaded"),
        "device_peak": most("allocated"),
        "device_used": most("used"),
        "pinned": most("pinned"),
    }
