"""What stands at a target that is replaced: which of its files go, and which stay."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from ckptool.engine.disk import rename_new
from ckptool.errors import CannotDo

_STAYS = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR))
"""Why a folder is not removed: something else is in it, it is a link, or it is gone."""


def kept_entries(folder: Path, own: Collection[str]) -> list[str]:
    """What in a folder is not among the files ``own``: files, and folders (with ``/``) as a whole.

    Links are entries like files. A folder in which one of the ``own`` lies is not one entry.
    """
    return sorted(_kept(folder, "", frozenset(own), _parents(own)))


def _kept(folder: Path, head: str, own: frozenset[str], parents: frozenset[str]) -> Iterable[str]:
    with os.scandir(folder / head) as entries:
        for entry in entries:
            name = head + entry.name
            if name in own:
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif name in parents:
                yield from _kept(folder, name + "/", own, parents)
            else:
                yield name + "/"


def _parents(files: Iterable[str]) -> frozenset[str]:
    """The folders that files lie in, at any depth."""
    return frozenset(str(parent) for file in files for parent in PurePosixPath(file).parents)


def in_conflict(folder: Path, own: Collection[str], new: Iterable[str]) -> list[str]:
    """What in a folder is not ``own``, and yet stands where one of the ``new`` files would be."""
    found = {_obstacle(folder, frozenset(own), name) for name in new}
    return sorted(name for name in found if name is not None)


def _obstacle(folder: Path, own: frozenset[str], name: str) -> str | None:
    for parent in [*PurePosixPath(name).parents][-2::-1]:
        path = folder / parent
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            return None if str(parent) in own else str(parent)
    return name if name not in own and os.path.lexists(folder / name) else None


def require_no_conflict(target: object, names: Collection[str]) -> None:
    """CannotDo where files that are not the old checkpoint's have names of the new one's."""
    if names:
        more = f", and {len(names) - 8} more" if len(names) > 8 else ""
        raise CannotDo(
            f"{target}: {', '.join([*names][:8])}{more}: not part of the checkpoint there, and the"
            " new one has files of these names",
            hint="move them away, or write elsewhere: what ckptool did not write is never removed",
        )


def move_kept(old: Path, new: Path, own: Collection[str]) -> list[str]:
    """Move by rename what is not ``own`` from one folder into another; what could not be moved."""
    left = []
    for name in kept_entries(old, own):
        left += _move(old, new, name.rstrip("/"))
    return left


def _move(old: Path, new: Path, name: str) -> list[str]:
    one, other = old / name, new / name
    _make_parents(old, new, PurePosixPath(name))
    if not os.path.lexists(other):
        rename_new(one, other)
        return []
    if any(path.is_symlink() or not path.is_dir() for path in (one, other)):
        return [name]
    left = [
        left for inner in sorted(os.listdir(one)) for left in _move(old, new, f"{name}/{inner}")
    ]
    if not left:
        one.rmdir()
    return left


def _make_parents(old: Path, new: Path, name: PurePosixPath) -> None:
    for parent in [*name.parents][-2::-1]:
        if not (new / parent).is_dir():
            (new / parent).mkdir()
            (new / parent).chmod((old / parent).stat().st_mode & 0o7777)


def remove_own(folder: Path, own: Iterable[str]) -> None:
    """Remove the files ``own`` of a folder, and the folders in it that are then empty."""
    files = list(own)
    for name in files:
        (folder / name).unlink(missing_ok=True)
    remove_emptied(folder, files)


def remove_emptied(folder: Path, files: Iterable[str]) -> None:
    """Remove the folders that the files lay in, as far as they are empty; not ``folder`` itself."""
    inner = _parents(files) - {"."}
    for name in sorted(inner, key=lambda name: name.count("/"), reverse=True):
        try:
            (folder / name).rmdir()
        except OSError as error:
            if error.errno not in _STAYS:
                raise
