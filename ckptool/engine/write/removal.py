"""Remove a checkpoint so that no part of it is ever mistaken for a complete one."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptool.engine.write.schemas import RemovalNote
from ckptool.engine.write.store_notes import read_note
from ckptool.errors import NotFound, TransferError, Unsupported
from ckptool.storage.clients.client import hidden_name
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.disk import is_real_folder, sync_folder
from ckptool.storage.note import dump_note, require_own_folder
from ckptool.storage.place import by_place, on_disk
from ckptool.storage.url import Location, RemotePath

_SUFFIX = ".ckptool-removed"


def remove(path: Location, side: Location | None = None) -> None:
    """Remove a checkpoint, a folder or a file, with the ``side`` file that goes with it, if any.

    On a disk it loses its name first; in a store a note first marks it incomplete. If this is
    interrupted, ``leftovers`` finds the rest. Raises TransferError.
    """
    with _removing(path):
        by_place(
            path,
            lambda place: _remove_named(place, side),
            lambda place: _remove_from_store(place, side),
        )


def remove_file(path: Location) -> None:
    """Remove one file of a checkpoint that is complete without it. Raises TransferError."""
    with _removing(path):
        by_place(path, _unlink, lambda place: place.store.remove([place.key], str(place)))


def _unlink(path: Path) -> None:
    path.unlink()
    sync_folder(path.parent)


def mounted_in(path: Location) -> Path | None:
    """Return where another file system begins at or below a path, or is bound there; else None."""
    disk = on_disk(path)
    if disk is None or disk.is_symlink():
        return None
    top = os.path.realpath(disk)
    for place in _mount_points():
        if place == top or place.startswith(f"{top}/"):
            return Path(place)
    # what /proc does not list, or where there is none
    device = _device(os.path.dirname(top))
    folders = (os.path.join(head, name) for head, names, _ in os.walk(top) for name in names)
    mounts = (place for place in (top, *folders) if _device(place) not in (device, None))
    return next(map(Path, mounts), None)


def _device(path: str) -> int | None:
    """Return the device of a file system; None if nothing is there any more."""
    try:
        return os.lstat(path).st_dev
    except FileNotFoundError:
        return None


def _mount_points() -> list[str]:
    """Return where file systems are mounted, also those bound from the same device (proc(5))."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return []
    places = [line.split(b" ")[4] for line in lines if line.count(b" ") > 4]
    return [os.fsdecode(re.sub(rb"\\([0-7]{3})", _unescape, place)) for place in places]


def _unescape(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8)])


def is_leftover(name: str) -> bool:
    """Return whether a name is what a removal gives a step before it deletes its files."""
    return name.startswith(".") and name.endswith(_SUFFIX)


def leftovers(folder: Location) -> Iterator[Location]:
    """Yield what interrupted removals have left directly in a folder."""
    yield from by_place(folder, _left_on_disk, _left_in_store)


def _left_on_disk(folder: Path) -> Iterator[Location]:
    return (folder / name for name in sorted(os.listdir(folder)) if is_leftover(name))


def _left_in_store(folder: RemotePath) -> Iterator[Location]:
    with suppress(NotFound):
        yield from (path for path in folder.iterdir() if _is_left_in_store(path))


def clear(leftover: Location) -> None:
    """Remove what an interrupted removal has left. Raises TransferError."""
    with _removing(leftover):
        by_place(leftover, _delete, _remove_from_store)


@contextmanager
def _removing(path: Location) -> Iterator[None]:
    """Raise TransferError if the disk or the store refuses to remove a path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise TransferError(f"{path}: cannot be removed: {reason}") from None


def _remove_named(path: Path, side: Location | None = None) -> None:
    aside = path.with_name(f".{path.name}{_SUFFIX}")
    _require_no_mount(path)
    _delete(aside)  # what an interrupted removal left
    os.rename(path, aside)
    sync_folder(path.parent)  # before a file goes: half a checkpoint must not come back by its name
    _delete(aside)
    if side is not None:
        _remove_named(path.with_name(side.name))


def _delete(path: Path) -> None:
    """Remove what lost its name before: a folder or file of this user, or a link."""
    if not is_real_folder(path):
        path.unlink(missing_ok=True)
        return
    require_own_folder(path)
    _require_no_mount(path)
    shutil.rmtree(path)


def _require_no_mount(path: Path) -> None:
    """Raise OSError if another file system is mounted in a folder: its files stay."""
    mount = mounted_in(path)
    if mount is not None:
        raise OSError(errno.EBUSY, f"another file system is mounted at {mount}")


def _remove_from_store(path: RemotePath, side: Location | None = None) -> None:
    """Remove all below a place, behind a note that readers refuse and that a later run obeys."""
    store = path.store
    files = store.find(path.key, str(path))
    if "" in files:
        keys = [path.key] if side is None else [path.key, path.with_name(side.name).key]
        store.remove(keys, str(path))
        return
    note = path / UNFINISHED
    # if nothing may be removed, the note would stay for ever on a complete checkpoint
    store.remove([note.with_name(hidden_name(note.name)).key], f"{path}: a test removal")
    note.write_bytes(dump_note(RemovalNote()))
    store.remove([(path / name).key for name in files if name != UNFINISHED], str(path))
    store.remove([note.key], str(path))


def _is_left_in_store(path: RemotePath) -> bool:
    """Return whether a folder's note says that it is being removed."""
    with suppress(NotFound, Unsupported):
        return UNFINISHED in path.listing and read_note(path / UNFINISHED, RemovalNote) is not None
    return False
