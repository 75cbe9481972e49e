"""Kill the loop in mid-save, and see what is left and what it passes for."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.commands.bench.files import (
    has_bytes,
    list_files,
    list_folder,
    list_shared_memory,
    remove,
    unused_shared_memory,
)
from ckptool.commands.bench.processes import Child, command_line, end_descendants, orphans
from ckptool.commands.bench.report import BROKEN, NOTHING, UNFINISHED, WHOLE, AbortResult

if TYPE_CHECKING:
    from ckptool.commands.bench.worker.rank import Rank

_GRACE = 3.0
"""Seconds that what a killed loop leaves is given to end by itself."""


def abort(rank: Rank, name: str, whole: Collection[str]) -> dict[str, Any]:
    """Kill every rank's loop in mid-save, look, and load what is left in fresh processes.

    ``whole``: the names of the files of a finished save.
    """
    temporary = Path(rank.task.temporary)
    shared, files = list_shared_memory(), list_folder(temporary)
    job = f"{name}-abort"
    folder = rank.make_folder(job)
    path = folder / "save"
    finished = _kill_in_mid_save(rank, name, job, path)
    processes = orphans(_GRACE)
    ranks = rank.meeting.gather([finished, [command_line(process) for process in processes]])
    own = {os.getpid(), *(process.pid for process in processes)}
    unused = unused_shared_memory(shared, own)
    stray = [folder / n for n in list_folder(folder) - {path.name}]
    stray += [temporary / n for n in list_folder(temporary) - files]
    rank.meeting.gather(None)
    end_descendants()
    verdict = _judge_folder(rank, name, path, whole)
    for leftover in [*unused, *stray]:
        remove(leftover)
    rank.clean(folder)
    result = AbortResult(
        folder=verdict,
        finished=all(over for over, _ in ranks),
        processes=tuple(command for _, commands in ranks for command in commands),
        shared=tuple(memory.name for memory in unused),
        files=tuple(sorted(map(str, stray))),
    )
    return asdict(result)


def _kill_in_mid_save(rank: Rank, name: str, job: str, path: Path) -> bool:
    """Kill once there are bytes on disk; return whether the save was over before that."""
    words: set[str] = set()
    work = rank.jobs.in_group(job, partial(rank.jobs.save_once, name, path))
    child = Child(work, rank.task.log(job, rank.meeting.rank), rank.task.timeout)

    def reason_to_kill() -> str | None:
        return "killed" if "saving" in words and has_bytes(path.parent) else None

    child.watch(reason_to_kill, lambda word, value: words.add(word), pause=0.001)
    child.kill()
    return "over" in words


def _judge_folder(rank: Rank, name: str, path: Path, whole: Collection[str]) -> str:
    """Say what the folder passes for: a checkpoint where no file of a finished one is missing.

    It is whole where the library loads it, bit for bit as it was at the call.
    """
    load = rank.run_job(f"{name}-load", partial(rank.jobs.load, name, path))
    if not list_folder(path):
        return NOTHING
    if not set(whole) <= set(list_files(path)):
        return UNFINISHED
    return WHOLE if load.value and not load.failure else BROKEN
