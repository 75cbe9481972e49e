"""What a save left on disk and in shared memory: sizes, syncing, leftovers."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptool.commands.bench.uploads import listed, remove_uploaded
from ckptool.engine.remote_path import Location

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
