"""Look at a place: whether anything is there, and the files of it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckptool.core.text import list_some, nearest
from ckptool.errors import Damaged, NoAnswer, NotFound, Unrecognized, refused_hint
from ckptool.storage.disk import write_whole
from ckptool.storage.files import Files
from ckptool.storage.local import LocalSource
from ckptool.storage.url import Location, RemotePath
from ckptool.storage.virtual.placed import PlacedFiles
from ckptool.storage.virtual.tar import is_tar, tar_members

if TYPE_CHECKING:
    from ckptool.storage.store import Traffic

_T = TypeVar("_T")
_QUOTES = "'\"‘’“”"
_MODEL = re.compile(r"(?:hf:)?(\w[\w.-]*/\w[\w.-]*)")
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
            hint = f"`ckptool inspect {path.parent}` shows what is beside it"
            raise NotFound(f"{path}: link to {target}: {_reason(error)}", hint=hint) from None
        meant = refused_hint(error) or _meant(path)
        raise NotFound(f"{path}: {_reason(error)}", hint=meant) from None
    except ValueError:
        raise NotFound(f"{str(path)!r}: invalid path: contains a null character") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Unrecognized(f"{path}: not a file or folder (pipe, socket or device)")


def on_disk(path: Location) -> Path | None:
    """Return the path of a place on a disk of this machine; None for one in a store.

    For what only a disk has: links, times of writing, other files around, a rename in one step.
    """
    return path if isinstance(path, Path) else None


def by_place(
    path: Location, on_disk: Callable[[Path], _T], in_store: Callable[[RemotePath], _T]
) -> _T:
    """Return the result of the function for where the place is: on a disk, or in a store."""
    return on_disk(path) if isinstance(path, Path) else in_store(path)


def absolute(path: Location) -> Location:
    """Return the same place, whatever the working folder; ``..`` is resolved without links."""
    return Path(os.path.abspath(path)) if isinstance(path, Path) else path


def folder_of(path: Location) -> Location:
    """Return the folder in which a place lies, also of ``.`` and ``..``."""
    return (path if path.name not in ("", "..") else absolute(path)).parent


def full_name(path: Location) -> str:
    """Return what names the place in another process, including credentials of a URL."""
    return os.path.abspath(path) if isinstance(path, Path) else path.url


def traffic_of(path: Location) -> Traffic | None:
    """Return the requests to the store of a place so far; None if it is on a disk."""
    return None if isinstance(path, Path) else path.store.traffic


def is_gone(path: Location) -> bool:
    """Return whether a file or folder on a disk no longer exists; False if the disk cannot say.

    A link to nothing exists: what it led to may be gone for other reasons than its removal.
    """
    if not isinstance(path, Path):
        return False
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def has_any(folder: Location, names: Collection[str]) -> bool:
    """Return whether one of some files is right in a folder.

    A disk is asked for these alone; a store's one listing is needed later, too.
    """
    if isinstance(folder, Path):
        return any((folder / name).exists() for name in names)
    return folder.is_dir() and not folder.listing.keys().isdisjoint(names)


def names_in(folder: Location) -> list[str]:
    """Return the names of what is right in a folder; nothing if it is gone or cannot be listed."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except NoAnswer:  # an OSError, too, but one that says nothing of the folder
        raise
    except (NotFound, OSError):
        return []


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


def write_file(path: Location, data: bytes, *, mark: bytes) -> None:
    """Create or replace a small file, whole or not at all; it and earlier ones begin with ``mark``.

    Raises as ``write_whole`` does; NotFound if a store denies it.
    """
    if isinstance(path, Path):
        write_whole(path, data, mark=mark)
    else:
        path.write_bytes(data)


def run_bounded(path: Location, work: Callable[[], _T]) -> _T:
    """Run ``work``; Damaged if unexpected metadata exhausts the stack or memory."""
    try:
        return work()
    except RecursionError:
        raise Damaged(f"{path}: metadata is nested too deeply") from None
    except MemoryError:
        raise Damaged(f"{path}: not enough memory to read the metadata") from None


def archive_in(source: Files, path: Location) -> PlacedFiles | None:
    """Return the contents of a ``.nemo`` file, read in place; None for any other file.

    Raises Damaged if its members cannot be read in place.
    """
    is_archive = path.name.endswith(ARCHIVE) and path.name in source.files
    return tar_members(source, path.name) if is_archive and is_tar(source, path.name) else None


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (error.strerror or "cannot be read").lower()


def _meant(path: Path) -> str | None:
    """Return a hint at what may be meant by a path: the same without quotes, a similar name here.

    Or at what is there; if its folder is missing, at a model of that name on the Hugging Face Hub.
    """
    plain = str(path).strip(_QUOTES)
    if plain != str(path) and os.path.lexists(plain):
        return f"did you mean {plain}, without the quotes?"
    try:
        names = os.listdir(path.parent)
    except OSError:
        model = _MODEL.fullmatch(str(path))
        return f"if it is a model on the Hugging Face Hub: hf://{model[1]}" if model else None
    close = nearest(path.name, names)
    if close:
        return f"did you mean {path.parent / close}?"
    shown = sorted(name for name in names if not name.startswith("."))
    where = "here" if str(path.parent) == "." else f"in {path.parent}"
    return f"{where} are {list_some(shown, 3)}" if shown else f"nothing is {where}"
