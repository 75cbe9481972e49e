"""Read what was written once more, and compare it with the source it was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from ckptool.core.plan import Plan, Tile
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.run import RunOptions, workers_within_budget
from ckptool.engine.sources import Files
from ckptool.engine.threads import share_jobs
from ckptool.engine.worker import Worker


def differing_files(
    plan: Plan,
    source: Files,
    folder: Path,
    options: RunOptions,
    progress: Callable[[int], None],
    *,
    numbers: Sequence[int],
) -> list[str]:
    """The files among ``numbers`` (places in the layout) whose tensors differ from the source's.

    ``folder`` is that of the written ones.
    """
    wrong: set[str] = set()

    def work(worker: Worker, tiles: list[Tile]) -> None:
        worker.forget_rows()
        for tile in tiles:
            path = plan.layout.files[tile.file].path
            if not worker.holds_tile(tile, path, shared=len(tiles) > 1):
                wrong.add(path)
            progress(tile.nbytes)

    groups = chain.from_iterable(plan.groups(batch, source.tile) for batch in plan.batches(numbers))
    jobs = chain.from_iterable(plan.jobs(group, source.tile) for group in groups)
    workers = workers_within_budget(plan, source, options)
    share_jobs(jobs, workers, lambda: Worker(source, folder, RecordCheck()), work)
    return sorted(wrong)
