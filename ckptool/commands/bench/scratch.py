"""The folders that a benchmark works in, which are gone at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptool.commands.bench.files import remove
from ckptool.commands.bench.store import Meeting


@contextmanager
def scratch(out: str) -> Iterator[list[str]]:
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
def scratch_of_all(out: str, meeting: Meeting) -> Iterator[list[str]]:
    """Rank 0's scratch folders, for every rank."""
    if meeting.rank:
        folders = meeting.gather(None)[0]
        Path(folders[1]).mkdir(exist_ok=True)  # each node has its own
        try:
            yield folders
            meeting.gather(None)
        finally:
            remove(Path(folders[1]))
        return
    with scratch(out) as folders:
        yield meeting.gather(folders)[0]
        meeting.gather(None)
