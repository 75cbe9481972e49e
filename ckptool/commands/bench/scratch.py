"""The folders that a benchmark works in, which are gone at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ckptool.commands.bench.files import remove
from ckptool.commands.bench.store import Meeting
from ckptool.commands.bench.uploads import emptied
from ckptool.engine.remote_path import Location


class Folders(NamedTuple):
    """Where the ranks work, their TMPDIR, and the URL to save below where that is in a store."""

    scratch: str
    temporary: str
    store: str | None


@contextmanager
def scratch(out: Location) -> Iterator[Folders]:
    """Folders of the run's own, which are removed at the end."""
    here = out if isinstance(out, Path) else None
    # sockets lie among the temporary files, and their paths must be short
    work, temporary = (tempfile.mkdtemp(prefix="ckptool-", dir=place) for place in (here, None))
    try:
        (Path(work) / "logs").mkdir()
        if isinstance(out, Path):
            yield Folders(work, temporary, None)
        else:
            with emptied(out / Path(work).name) as place:
                yield Folders(work, temporary, place.url)
    finally:
        for folder in (work, temporary):
            remove(Path(folder))


@contextmanager
def scratch_of_all(out: Location, meeting: Meeting) -> Iterator[Folders]:
    """Rank 0's scratch folders, for every rank."""
    if meeting.rank:
        folders = Folders(*meeting.gather(None)[0])
        own = [folders.temporary] if folders.store is None else [folders.temporary, folders.scratch]
        for folder in own:  # each node has its own
            (Path(folder) / "logs").mkdir(parents=True, exist_ok=True)
        try:
            yield folders
            meeting.gather(None)
        finally:
            for folder in own:
                remove(Path(folder))
        return
    with scratch(out) as folders:
        yield Folders(*meeting.gather(folders)[0])
        meeting.gather(None)
