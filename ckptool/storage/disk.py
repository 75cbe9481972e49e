"""Change a disk: rename without loss, make files without following links, reserve room, sync."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptool.errors import Committed, Unsupported, refused_hint

_HERE = -100
_NO_REPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset(
    (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EBUSY, errno.EPERM)
)
"""Also what overlays, mount points and sandboxes answer: a plain rename then works, or says why."""
CANNOT_MOVE = frozenset((errno.EXDEV, errno.EBUSY))
"""The errors of renaming a folder on an overlay's lower layer, or a mount point."""


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False if this file system cannot."""
    return _rename(first, second, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename to a name that is not taken; FileExistsError if it is."""
    if _rename(source, target, _NO_REPLACE):
        return
    if os.path.lexists(target):  # not in one step with the rename, but there is no such step here
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


_BEGIN_WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux."""


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Call ``renameat2``; False if this file system lacks it, OSError if it fails."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    names = (_HERE, os.fsencode(source), _HERE, os.fsencode(target))
    if call(*names, ctypes.c_uint(flag)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    if number == errno.EEXIST:
        raise FileExistsError(number, os.strerror(number), str(target))
    raise OSError(number, os.strerror(number), str(source))


def identity(path: Path) -> int | None:
    """Return the inode of what is at a path, None if nothing is; follows no link."""
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def folder_identity(path: Path) -> int | None:
    """Return the inode of a real folder on the disk of its parent, None if there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    is_here = stat.S_ISDIR(status.st_mode) and status.st_dev == os.stat(path.parent).st_dev
    return status.st_ino if is_here else None


@contextmanager
def open_folder(folder: Path, below: str = "") -> Iterator[int]:
    """Open a folder, or one below it, to use names in it; a link on the way is not followed.

    Raises FileNotFoundError or NotADirectoryError if there is none.
    """
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        for name in filter(None, below.split("/")):
            parent, descriptor = descriptor, os.open(name, flags, dir_fd=descriptor)
            os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def is_real_folder(path: Path) -> bool:
    """Return whether a folder is there, and not a link to one."""
    with suppress(FileNotFoundError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def is_real_file(path: Path) -> bool:
    """Return whether a regular file is there, and not a link to one."""
    with suppress(FileNotFoundError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def first_stranger(folder: Path) -> Path | None:
    """Find an entry below a folder that is neither a regular file nor a folder, such as a link."""
    for head, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = Path(head, name)
            if not stat.S_ISDIR(mode := os.lstat(path).st_mode) and not stat.S_ISREG(mode):
                return path
    return None


def _raise(error: OSError) -> None:
    raise error


def begins_with(path: Path, mark: bytes) -> bool:
    """Return whether a file begins with a mark, or ends within it."""
    with open(path, "rb") as stream:
        return mark.startswith(stream.read(len(mark)))


def open_unfollowed(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file, created if missing; Unsupported if a link is there."""
    try:  # O_NONBLOCK: a pipe there would be waited for
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO):
            raise in_the_way(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise in_the_way(path)
    return descriptor


def in_the_way(path: Path) -> Unsupported:
    """Return the error for an entry in ckptool's way that it did not create."""
    return Unsupported(
        f"{path}: is in the way: ckptool needs this name, but did not create what is there",
        hint=f"check what it is, then move it away: mv {path} ELSEWHERE",
    )


def nearest_folder(folder: Path) -> Path:
    """Return a folder, or the nearest around it that exists; Unsupported for a file in the way."""
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not place.is_dir():
        raise Unsupported(
            f"{place}: not a folder to write into",
            hint=f"it is a file: write beside it, in {place.parent}",
        )
    return place


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at_most(path: Path, limit: int) -> bytes:
    """Return a file, or that many bytes of it: a device or a pipe has no size, maybe no end."""
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(min(1 << 20, limit - len(data))):
            data += piece
    return bytes(data)


def write_whole(path: Path, data: bytes, *, mark: bytes) -> None:
    """Create or replace a small file: at any moment the old one is there, or the new one.

    Missing folders are made. ``mark`` is what files of this kind begin with, also those that a
    killed run left beside the target. Raises Unsupported if a file does not or cannot be written,
    Committed if it was written but the disk did not confirm it.
    """
    part = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftover(part, mark)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(descriptor)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror}"
        raise Unsupported(message, hint=refused_hint(error)) from None
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise Committed(
            f"{path}: the new one is there, but the disk did not confirm it: {error.strerror}"
        ) from None


def require_marked(path: Path, mark: bytes, *, noun: str) -> None:
    """Raise Unsupported if the file at a path, which is to be replaced, is of another kind."""
    if os.path.lexists(path) and not (path.is_file() and begins_with(path, mark)):
        raise Unsupported(
            f"{path}: not a {noun}, and is not replaced",
            hint=f"name another file, or move it away: mv {path} ELSEWHERE",
        )


def _remove_leftover(part: Path, mark: bytes) -> None:
    if not os.path.lexists(part):
        return
    if not (is_real_file(part) and begins_with(part, mark)):
        raise in_the_way(part)
    part.unlink()


_NOT_RESERVED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def allocate(descriptor: int, nbytes: int) -> None:
    """Give an empty file its size, and its blocks if the file system can reserve them.

    A full disk shows before a byte moves, and writing costs half: on ext4 (Linux 6.18) 0.22 s
    against 0.47 s for 1.6 GiB. ``os.posix_fallocate`` would write every block where reserving is
    not supported; this only sets the size there. Raises OSError if the disk has no room.
    """
    import ctypes

    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if nbytes and reserve is not None:
        wide = (ctypes.c_int64(0), ctypes.c_int64(nbytes))
        if reserve(descriptor, 0, *wide) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NOT_RESERVED:
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, nbytes)


def begin_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Begin to write a run of a file to its disk, as far as that has room, where the system can.

    A later ``fsync`` then has little left to wait for, and reports what failed.
    """
    import ctypes

    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(descriptor, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _BEGIN_WRITE)
