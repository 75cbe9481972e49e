"""Whether there is room at a target: for its bytes, its files and its names."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from ckptool.engine.write.existing import written_files
from ckptool.errors import Unsupported
from ckptool.storage.disk import nearest_folder

_NOTES = 4
"""Notes and journals of a run beside its files, each of a block or so."""
_BLOCK = 4096
"""Bytes of the largest block that each file is rounded up to: network shares say more than they
take.
"""


def require_space(folder: Path, staged: Path, sizes: Mapping[str, int]) -> None:
    """Raise Unsupported if the disk of a folder lacks room for files of these ``sizes`` in it.

    Those that are already ``staged`` need none.
    """
    status = os.statvfs(nearest_folder(folder))
    written = written_files(staged, sizes).values()
    block = min(status.f_frsize, _BLOCK)
    needed = sum(-(-nbytes // block) * block for nbytes in sizes.values()) + _NOTES * block
    free = status.f_bavail * status.f_frsize + sum(512 * file.st_blocks for file in written)
    if needed > free:
        raise Unsupported(
            f"{folder}: {needed:,} bytes are needed, {free:,} are free",
            hint=f"free {needed - free:,} bytes, or write to another disk",
        )
    files, left = len(sizes) - len(written) + _NOTES, status.f_favail
    if status.f_files and files > left:  # some file systems count no files
        raise Unsupported(
            f"{folder}: {files:,} files are to be written, and the disk has room for {left:,} more",
            hint=f"remove {files - left:,} files, or write to another disk; `df -i` counts them",
        )


def room_left(folder: Path, cause: BaseException | None) -> str:
    """Return what is free on the disk of a folder if a full one caused an error, else nothing."""
    if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    status = os.statvfs(nearest_folder(folder))
    free = f": {status.f_bavail * status.f_frsize:,} bytes are free"
    return f"{free}, and room for {status.f_favail:,} files" if status.f_files else free


def require_short_names(folder: Path, names: Collection[str], hint: str) -> None:
    """Raise Unsupported if the file system of a folder does not allow names as long as these.

    Not every file system knows its limit: some report 0, or none.
    """
    nearest, parts = nearest_folder(folder), {part for path in names for part in path.split("/")}
    paths = {f"{folder}/{path}" for path in names}
    for what, limit, texts in (("file names", "NAME", parts), ("paths", "PATH", paths)):
        most = os.pathconf(nearest, f"PC_{limit}_MAX")
        for text in texts if most > 0 else ():
            nbytes = len(text.encode(errors="replace"))
            if nbytes > most:
                message = f"{folder}: {what} have at most {most:,} bytes, {text} has {nbytes:,}"
                raise Unsupported(message, hint=hint)
