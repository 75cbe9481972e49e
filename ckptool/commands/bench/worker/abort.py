"""Kill the loop during a save, and check what is left and whether it is accepted."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from ckptool.commands.bench.processes import (
    Tell,
    command_line,
    end_descendants,
    orphans,
    run_child,
)
from ckptool.commands.bench.report import BROKEN, NOTHING, UNFINISHED, WHOLE, AbortResult
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.strategies.base import Strategy
from ckptool.commands.bench.worker.consistency import find_differences, snapshot
from ckptool.commands.bench.worker.device import Device
from ckptool.commands.bench.worker.loop import train_beside
from ckptool.commands.bench.worker.training import Training

if TYPE_CHECKING:
    from ckptool.commands.bench.worker.rank import Rank

_GRACE = 3.0
"""Seconds within which processes of a killed loop may end by themselves."""


def abort(rank: Rank, name: str, strategy: Strategy, whole: Collection[str]) -> dict[str, Any]:
    """Kill every rank's loop during a save, inspect, and load what is left in fresh processes.

    ``whole``: the names of the files of a finished save.
    """
    temporary = Path(rank.task.folders.temporary)
    files = _names_in(temporary)
    job = f"{name}-abort"
    folder = rank.make_folder(job)
    path = folder / "save"
    finished = _kill_in_mid_save(rank, strategy, job, path)
    processes = orphans(_GRACE)
    ranks = rank.meeting.gather([finished, [command_line(process) for process in processes]])
    pids = {os.getpid(), *(process.pid for process in processes)}
    unused = rank.shared.left(pids)
    stray = [folder / n for n in _names_in(folder) - {path.name}]
    stray += [temporary / n for n in _names_in(temporary) - files]
    rank.meeting.gather(None)
    end_descendants(rank.shared.look)
    verdict = _judge_folder(rank, name, strategy, path, whole)
    for leftover in stray:
        DiskFolder(leftover).remove()
    rank.clean(folder)
    result = AbortResult(
        folder=verdict,
        finished=all(has_finished for has_finished, _ in ranks),
        processes=tuple(command for _, commands in ranks for command in commands),
        shared=tuple(memory.name for memory in unused),
        files=tuple(sorted(map(str, stray))),
    )
    return asdict(result)


def _kill_in_mid_save(rank: Rank, strategy: Strategy, job: str, path: Path) -> bool:
    """Save, and kill once there are bytes on disk; return whether the save finished before that."""
    words: set[str] = set()
    pulse = rank.pulse(job)

    def hear(word: str, value: Any) -> None:
        words.add(word)
        pulse.hear(word, value)

    def stop() -> str | None:
        return "killed" if "saving" in words and _has_bytes(path.parent) else pulse.problem()

    def save_once(device: Device, tell: Tell) -> None:
        training = Training.begin(rank.task.specs, device)
        strategy.set_up(device)
        tell("saving", None)
        handle = strategy.save(training.state, path)
        train_beside(handle, training, tell)
        handle.commit()
        tell("over", None)
        strategy.finish()

    run_child(
        rank.in_group(job, save_once),
        rank.task.log(job, rank.meeting.rank),
        timeout=rank.task.timeout,
        stop=stop,
        on_event=hear,
        look=rank.shared.look,
        pause=0.001,
    )
    return "over" in words


def _judge_folder(
    rank: Rank, name: str, strategy: Strategy, path: Path, whole: Collection[str]
) -> str:
    """Return the verdict on the folder: a checkpoint if no file of a finished one is missing.

    It is whole if the library loads it, bit for bit as it was at the call.
    """

    def load(device: Device, tell: Tell) -> bool:
        training = Training.begin(rank.task.specs, device)
        strategy.set_up(device)
        try:
            loaded = strategy.load(training.empty_state(), path)
            return not find_differences(snapshot(training.state), loaded).names
        finally:
            strategy.finish()

    loaded = rank.run_job(f"{name}-load", load)
    if not _names_in(path):
        return NOTHING
    if not set(whole) <= DiskFolder(path).sizes().keys():
        return UNFINISHED
    return WHOLE if loaded.value and not loaded.failure else BROKEN


def _has_bytes(folder: Path) -> bool:
    """Whether any file below the folder has a byte in it."""
    with suppress(OSError):
        return any(DiskFolder(folder).sizes().values())
    return False


def _names_in(folder: Path) -> set[str]:
    """Return the names directly in a folder; none if it does not exist."""
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()
