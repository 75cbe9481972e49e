"""Look at a place: whether anything is there, and the files of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckptool.core.text import nearest
from ckptool.errors import Damaged, NotFound, Unrecognized
from ckptool.storage.local import Files, LocalSource
from ckptool.storage.tar import TarFiles, is_tar
from ckptool.storage.url import Location

_T = TypeVar("_T")
ARCHIVE = ".nemo"
"""NeMo 1.7 to 2.6 packs a model as a tar."""


def require_there(path: Location) -> None:
    """Raise NotFound if there is no such file or folder, Unrecognized if it is another thing."""
    if not isinstance(path, Path):
        path.require_there()
        return
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if path.is_symlink():
            target = os.readlink(path)
            raise NotFound(f"{path}: link to {target}: {_reason(error)}") from None
        raise NotFound(f"{path}: {_reason(error)}", hint=_similar(path)) from None
    except ValueError:
        raise NotFound(f"{str(path)!r}: invalid path: contains a null character") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Unrecognized(f"{path}: not a file or folder (pipe, socket or device)")


def folder_at(path: Location) -> Files:
    """Return the files below a folder."""
    if isinstance(path, Path):
        return LocalSource.folder(path)
    from ckptool.storage.remote import RemoteSource

    return RemoteSource.folder(path)


def file_at(path: Location) -> Files:
    """Return a single file with the files that belong to it."""
    if isinstance(path, Path):
        return LocalSource.file(path)
    from ckptool.storage.remote import RemoteSource

    return RemoteSource.file(path)


def run_bounded(path: Location, work: Callable[[], _T]) -> _T:
    """Run ``work``; Damaged if unexpected metadata exhausts the stack or memory."""
    try:
        return work()
    except RecursionError:
        raise Damaged(f"{path}: metadata is nested too deeply") from None
    except MemoryError:
        raise Damaged(f"{path}: not enough memory to read the metadata") from None


def archive_in(source: Files, path: Location) -> TarFiles | None:
    """Return the contents of a ``.nemo`` file, read in place; None for any other file.

    Raises Damaged if its members cannot be read in place.
    """
    is_archive = path.name.endswith(ARCHIVE) and path.name in source.files
    return TarFiles.of(source, path.name) if is_archive and is_tar(source, path.name) else None


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (error.strerror or "cannot be read").lower()


def _similar(path: Path) -> str | None:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return None
    close = nearest(path.name, names)
    return f"did you mean {path.parent / close}?" if close else None
