"""Remove a checkpoint so that no part of it is ever mistaken for a complete one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptool.engine.write.schemas import RemovalNote, json_of
from ckptool.engine.write.writer import read_note
from ckptool.errors import NotFound, TransferError, Unsupported
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.disk import is_real_folder, sync_folder
from ckptool.storage.multipart import hidden_name
from ckptool.storage.note import require_own_folder
from ckptool.storage.url import Location, RemotePath

_SUFFIX = ".ckptool-removed"


def remove(path: Location, side: Location | None = None) -> None:
    """Remove a checkpoint, a folder or a file, with the ``side`` file that goes with it, if any.

    On a disk it loses its name first; in a store a note first marks it incomplete. If this is
    interrupted, ``leftovers`` finds the rest. Raises TransferError.
    """
    with _removing(path):
        if isinstance(path, Path):
            _remove_named(path)
            if isinstance(side, Path):
                _remove_named(side)
        else:
            _remove_from_store(path, side)


def remove_file(path: Location) -> None:
    """Remove one file of a checkpoint that is complete without it. Raises TransferError."""
    with _removing(path):
        if isinstance(path, Path):
            path.unlink()
            sync_folder(path.parent)
        else:
            path.store.remove([path.key], str(path))


def leftovers(folder: Location) -> Iterator[Location]:
    """Yield what interrupted removals have left directly in a folder."""
    if isinstance(folder, Path):
        for name in sorted(os.listdir(folder)):
            if name.startswith(".") and name.endswith(_SUFFIX):
                yield folder / name
        return
    with suppress(NotFound):
        yield from (path for path in folder.iterdir() if _is_left_in_store(path))


def clear(leftover: Location) -> None:
    """Remove what an interrupted removal has left. Raises TransferError."""
    with _removing(leftover):
        if isinstance(leftover, Path):
            _delete(leftover)
        else:
            _remove_from_store(leftover)


@contextmanager
def _removing(path: Location) -> Iterator[None]:
    """Raise TransferError if the disk or the store refuses to remove a path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise TransferError(f"{path}: cannot be removed: {reason}") from None


def _remove_named(path: Path) -> None:
    aside = path.with_name(f".{path.name}{_SUFFIX}")
    _delete(aside)
    _require_one_disk(path)
    os.rename(path, aside)
    sync_folder(path.parent)
    _delete(aside)


def _delete(path: Path) -> None:
    """Remove what lost its name before: a folder or file of this user, or a link."""
    if not is_real_folder(path):
        path.unlink(missing_ok=True)
        return
    require_own_folder(path)
    _require_one_disk(path)
    shutil.rmtree(path)


def _require_one_disk(path: Path) -> None:
    """Raise OSError if another disk is mounted in a folder: what is on it is not the folder's."""
    if not is_real_folder(path):
        return
    device = os.lstat(path).st_dev
    for head, folders, _ in os.walk(path):
        for name in folders:
            inner = os.path.join(head, name)
            status = os.lstat(inner)
            if stat.S_ISDIR(status.st_mode) and status.st_dev != device:
                raise OSError(errno.EXDEV, f"another disk is mounted at {inner}")


def _remove_from_store(path: RemotePath, side: Location | None = None) -> None:
    """Remove all below a place, behind a note that readers refuse and that a later run obeys."""
    store = path.store
    files = store.find(path.key, str(path))
    if "" in files:
        others = [side.key] if isinstance(side, RemotePath) else []
        store.remove([path.key, *others], str(path))
        return
    note = path / UNFINISHED
    # if nothing may be removed, the note would stay for ever on a complete checkpoint
    store.remove([note.with_name(hidden_name(note.name)).key], f"{path}: a test removal")
    note.write_bytes(json.dumps(json_of(RemovalNote())).encode())
    store.remove([(path / name).key for name in files if name != UNFINISHED], str(path))
    store.remove([note.key], str(path))


def _is_left_in_store(path: RemotePath) -> bool:
    """Return whether a folder's note says that it is being removed."""
    with suppress(NotFound, Unsupported):
        return UNFINISHED in path.listing and read_note(path / UNFINISHED, RemovalNote) is not None
    return False
