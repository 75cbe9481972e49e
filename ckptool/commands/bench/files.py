"""What a save left on disk and in shared memory: sizes, syncing, leftovers.

The folders that a benchmark works in, which are gone at its end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckptool.commands.bench.store import Meeting, emptied, listed, remove_uploaded
from ckptool.storage.url import Location

SHARED = Path("/dev/shm")
_PAUSES = (0.02, 0.1, 0.5, 1.0, 0.0)


def usage(folder: Location) -> dict[str, Any]:
    """The bytes, number and names of the files below a folder."""
    if isinstance(folder, Path):
        sizes = {name: (folder / name).stat().st_size for name in names(folder)}
    else:
        sizes = listed(folder)
    return {"nbytes": sum(sizes.values()), "files": len(sizes), "names": list(sizes)}


def names(folder: Path) -> list[str]:
    """The files below a folder, relative to it."""
    return sorted(str(file.relative_to(folder)) for file in _files(folder))


def holds_bytes(folder: Path) -> bool:
    """Whether any file below the folder has a byte in it."""
    with suppress(OSError):
        return any(file.stat().st_size for file in _files(folder))
    return False


def _files(folder: Path) -> Iterator[Path]:
    return (Path(top, name) for top, _, names in os.walk(folder) for name in names)


def make_durable(folder: Location) -> None:
    """Fsync every file and folder below, the folder itself, and its parent's entry for it.

    A store has nothing to sync: a file that is there is safe.
    """
    if not isinstance(folder, Path):
        return
    for path in [*_files(folder), *(Path(top) for top, _, _ in os.walk(folder)), folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Location) -> None:
    """Remove a file or a folder with all in it, as far as it is there, also while it is filled."""
    if not isinstance(path, Path):
        remove_uploaded(path)
    elif path.is_dir() and not path.is_symlink():
        for pause in _PAUSES:
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                return
            time.sleep(pause)
    else:
        with suppress(OSError):
            path.unlink()


def entries(folder: Path) -> set[str]:
    """The names directly in a folder; none where it is not there."""
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def shared_entries() -> set[str]:
    """The names of this user's shared memory."""
    found = set()
    for name in entries(SHARED):
        with suppress(OSError):
            if (SHARED / name).lstat().st_uid == os.getuid():
                found.add(name)
    return found


def shared_free() -> int:
    """Bytes that can still be put into shared memory."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0


def left_shared(before: Collection[str], doomed: Collection[int] = ()) -> list[Path]:
    """Shared memory since ``before`` that nobody has open but ``doomed`` processes."""
    fresh = shared_entries() - set(before)
    return [SHARED / name for name in sorted(fresh) if _opened_by(name) <= set(doomed)]


def _opened_by(name: str) -> set[int]:
    """The processes that have a piece of shared memory open or mapped, as far as can be seen."""
    path = str(SHARED / name)
    return {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _has_open(pid, path)}


def _has_open(pid: str, path: str) -> bool:
    with suppress(OSError):
        if path in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace"):
            return True
        folder = Path(f"/proc/{pid}/fd")
        return any(os.readlink(link) == path for link in folder.iterdir())
    return False


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
