"""Kill the loop in mid-save, and see what is left and what it passes for."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptool.commands.bench.files import (
    entries,
    holds_bytes,
    left_shared,
    names,
    remove,
    shared_entries,
)
from ckptool.commands.bench.fork_server import Child, end_orphans, orphans

if TYPE_CHECKING:
    from ckptool.commands.bench.worker.rank import Rank

GRACE = 3.0
"""Seconds that what a killed loop leaves is given to end by itself."""

NOTHING = "nothing there"
UNFINISHED = "does not pass"
WHOLE = "passes, whole"
BROKEN = "PASSES, NOT WHOLE"


@dataclass(frozen=True, slots=True)
class Left:
    """What is there once the loop is gone. ``folder`` is one of the verdicts above.

    ``finished``: the save was over before the kill. ``processes`` are command lines, ``shared``
    names in /dev/shm, ``files`` paths of temporary files.
    """

    folder: str
    finished: bool
    processes: tuple[str, ...]
    shared: tuple[str, ...]
    files: tuple[str, ...]


def abort(rank: Rank, name: str, whole: Collection[str]) -> dict[str, Any]:
    """Kill every rank's loop in mid-save, look, and load what is left in fresh processes.

    ``whole``: the names of the files of a finished save.
    """
    temporary = Path(rank.task.temporary)
    shared, files = shared_entries(), entries(temporary)
    job = f"{name}-abort"
    folder = rank.make_folder(job)
    path = folder / "save"
    finished = _kill_in_mid_save(rank, name, job, path)
    processes = orphans(GRACE)
    told = rank.meeting.gather([finished, [process.command for process in processes]])
    own = {os.getpid(), *(process.pid for process in processes)}
    fresh = left_shared(shared, own)
    stray = [folder / n for n in entries(folder) - {path.name}]
    stray += [temporary / n for n in entries(temporary) - files]
    rank.meeting.gather(None)
    end_orphans()
    verdict = _verdict(rank, name, path, whole)
    for left in [*fresh, *stray]:
        remove(left)
    rank.clean(folder)
    found = Left(
        folder=verdict,
        finished=all(over for over, _ in told),
        processes=tuple(command for _, commands in told for command in commands),
        shared=tuple(left.name for left in fresh),
        files=tuple(sorted(map(str, stray))),
    )
    return asdict(found)


def _kill_in_mid_save(rank: Rank, name: str, job: str, path: Path) -> bool:
    """Kill once there are bytes on disk; whether the save was over before that."""
    words: set[str] = set()
    work = rank.fresh.grouped(job, partial(rank.fresh.save_once, name, path))
    child = Child(work, rank.task.log(job, rank.meeting.rank), rank.task.timeout)

    def due() -> str | None:
        return "killed" if "saving" in words and holds_bytes(path.parent) else None

    child.watch(due, lambda word, value: words.add(word), pause=0.001)
    child.kill()
    return "over" in words


def _verdict(rank: Rank, name: str, path: Path, whole: Collection[str]) -> str:
    """What the folder is: it passes for a checkpoint where no file of a finished one is missing.

    It is whole where the library loads it, bit for bit as it was at the call.
    """
    load = rank.child(f"{name}-load", partial(rank.fresh.load, name, path))
    if not entries(path):
        return NOTHING
    if not set(whole) <= set(names(path)):
        return UNFINISHED
    return WHOLE if load.value and not load.failure else BROKEN
