"""What tells whether a file is the one that was listed, and still holds what it held then."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from ckptool.errors import Changed, Problem


class FileStatus(NamedTuple):
    """A file as the file system describes it; times in nanoseconds.

    ``changed`` is the time of the last change of anything, which nothing sets back. ``access`` is
    mode, owner, group and count of links: a change of these alone leaves the content as it is.
    """

    nbytes: int
    modified: int
    inode: int
    changed: int
    access: tuple[int, int, int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        """Return the part of a stat that tells one content from another."""
        access = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns, access)

    def has_content_of(self, before: FileStatus) -> bool:
        """Return whether nothing was written since ``before``, as far as a file system tells."""
        if self[:3] != before[:3]:
            return False
        return self.changed == before.changed or self.access != before.access


def status_now(path: str) -> FileStatus | None:
    """Return the status of a file, None where it is gone or cannot be opened.

    Opened, not only looked at: a network file system then asks its server.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return FileStatus.of(os.fstat(descriptor))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def changed(files: Iterable[str]) -> Changed:
    """Return the error for files that were written, replaced or removed while they were read."""
    first, *others = files
    more = f", and {len(others):,} more were" if others else ""
    return Changed(
        Problem(f"{first}: it was changed while it was read{more}", "file-changed", file=first),
        hint="run the same command again once nothing writes to the source",
    )
