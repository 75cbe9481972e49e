"""The files below a folder of a disk, and what of it cannot be looked at."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

from ckptool.engine.file_status import FileStatus
from ckptool.errors import NotFound, Problem

DEPTH = 32
"""How many folders deep a checkpoint's folder is looked at."""
_TOO_DEEP = f"not looked into: it lies more than {DEPTH} folders deep"
_MOST_ENTRIES = 200_000
_MOST_VISITS = 200


def _why_unlisted(path: str, error: OSError) -> Problem:
    """Return why an entry is not listed; its code tells a link to nothing from what is gone."""
    if os.path.islink(path) and error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
        return Problem("a link to nothing", "file-missing")
    if error.errno == errno.ENOENT:
        return Problem("it was removed while its folder was listed", "file-changed")
    return Problem(f"cannot be read: {error.strerror}", "file-unreadable")


class Walk:
    """The files below ``root``, with a bound on all that is looked at.

    ``unlisted`` says of every entry that could not be looked at why.
    """

    def __init__(self, root: Path) -> None:
        self.files: dict[str, FileStatus] = {}
        self.unlisted: dict[str, Problem] = {}
        self._root = root
        self._seen = 0
        self._visits: Counter[tuple[int, int]] = Counter()

    def enter(self, head: str, parents: tuple[tuple[int, int], ...], depth: int) -> None:
        """Note the files of one folder and of those below. OSError where it cannot be listed."""
        folder = self._root / head
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            return
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:
            raise NotFound(
                f"{self._root}: more than {_MOST_VISITS} links lead to {folder};"
                " name the checkpoint itself"
            )
        with os.scandir(folder) as entries:
            names = [entry for entry in entries if self._count()]
        for entry in names:
            try:
                self._note(entry, head, (*parents, identity), depth)
            except OSError as error:
                self.unlisted[head + entry.name] = _why_unlisted(entry.path, error)

    def _note(
        self, entry: os.DirEntry[str], head: str, parents: tuple[tuple[int, int], ...], depth: int
    ) -> None:
        name = head + entry.name
        if entry.is_dir():
            if depth > 0:
                self.enter(name + "/", parents, depth - 1)
            else:
                self.unlisted[name] = Problem(_TOO_DEEP, "file-unreadable")
        elif entry.is_file():
            self.files[name] = FileStatus.of(entry.stat())
        else:
            os.stat(entry.path)  # fails where it is a link to nothing, or no longer there

    def _count(self) -> bool:
        self._seen += 1
        if self._seen > _MOST_ENTRIES:
            raise NotFound(
                f"{self._root}: more than {_MOST_ENTRIES:,} files and folders;"
                " name the checkpoint itself"
            )
        return True
