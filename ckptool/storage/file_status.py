"""The files below a folder of a disk, and whether they are still those that were listed."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptool.errors import Changed, Damaged, NotFound, Problem
from ckptool.storage.clients.client import ObjectInfo

_T = TypeVar("_T")


class FileStatus(NamedTuple):
    """A file as the file system describes it; times in nanoseconds.

    ``changed`` is the time of the last change of anything, which nothing sets back. ``access`` is
    mode, owner, group and link count: a change of these alone leaves the content unchanged.
    """

    nbytes: int
    modified: int
    inode: int
    changed: int
    access: tuple[int, int, int, int]

    @property
    def version(self) -> int:
        """The time of the last change of the content, in nanoseconds."""
        return self.modified

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        """Return the part of a stat that distinguishes contents."""
        access = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns, access)

    def has_content_of(self, snapshot: FileStatus) -> bool:
        """Return whether nothing was written since a snapshot, as far as the file system shows."""
        if self[:3] != snapshot[:3]:
            return False
        return self.changed == snapshot.changed or self.access != snapshot.access


def status_now(path: str) -> FileStatus | None:
    """Return the status of a file, None if it is gone or cannot be opened.

    The file is opened, so that a network file system asks its server.
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


def version_digest(
    listed: Mapping[str, FileStatus] | Mapping[str, ObjectInfo], files: Iterable[str]
) -> str:
    """Return a SHA-256 (hex) over names, sizes and versions of some files as they were listed.

    Raises Damaged if one was not.
    """
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(files):
        if name not in listed:
            raise missing(name)
        digest.update(repr((name, listed[name].nbytes, listed[name].version)).encode())
    return digest.hexdigest()


def missing(file: str) -> Damaged:
    """Return the error for a missing file."""
    return Damaged(f"{file}: the file is missing", "file-missing", file=file)


def changed(files: Iterable[str]) -> Changed:
    """Return the error for files that were written, replaced or removed while they were read."""
    first, *rest = files
    more = f", and {len(rest):,} more were" if rest else ""
    return Changed(
        f"{first}: it was changed while it was read{more}",
        "file-changed",
        file=first,
        hint="run the same command again once nothing writes to the source",
    )


DEPTH = 32
"""How many folder levels of a checkpoint's folder are listed."""
NO_FILE = "file-type-mismatch"
"""The code of what has the name of a file, and is something else."""
_FILES_ONLY = (".json", ".extra.pt")
"""Suffixes that no folder of a checkpoint has."""
_TOO_DEEP = f"not searched: more than {DEPTH} folders deep"
_MOST_ENTRIES = 500_000
"""More than a few saves of 16,384 ranks have; listing so many takes seconds, in 400 MB."""
_MOST_VISITS = 200
"""Links that lead to one folder: within one another they would multiply, and listing never end."""


def is_file_there(path: Path) -> bool:
    """Return whether a file is at a path, False only if nothing is.

    Raises NotFound for a link to nothing, what is no file, and what cannot be examined.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise NotFound(f"{path}: a link to nothing", "file-missing", file=path.name) from None
        return False
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise NotFound(message, "file-unreadable", file=path.name) from None
    if not stat.S_ISREG(mode):
        raise NotFound(f"{path}: not a file", NO_FILE, file=path.name)
    return True


def _why_unlisted(path: str, error: OSError) -> Problem:
    """Return why an entry is not listed; dangling links have a code of their own."""
    if os.path.islink(path) and error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
        return Problem("a link to nothing", "file-missing")
    if error.errno == errno.ENOENT:
        return Problem("it was removed while its folder was listed", "file-changed")
    return Problem(f"cannot be read: {error.strerror}", "file-unreadable")


class FileListing:
    """The files below ``root``, up to a limit, or ``near`` it: in it and in its own folders.

    ``unlisted`` is why entries could not be listed, by path.
    """

    def __init__(self, root: Path, *, near: bool = False) -> None:
        self.files: dict[str, FileStatus] = {}
        self.unlisted: dict[str, Problem] = {}
        self._root = root
        self._near = near
        self._total = 0
        self._entries: Counter[str] = Counter()
        """How many lie in each entry of the root, and in it (an empty name)."""
        self._visits: Counter[tuple[int, int]] = Counter()

    def take(self) -> None:
        """Note all files; OSError if the folder cannot be listed."""
        self._enter("", (), 1 if self._near else DEPTH)

    def _enter(self, head: str, parents: tuple[tuple[int, int], ...], depth: int) -> None:
        """Note the files of one folder and of those below; OSError if it cannot be listed."""
        folder = self._root / head
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in parents:  # by a link to a folder around it
            return
        self._visits[identity] += 1
        if self._visits[identity] > _MOST_VISITS:
            raise NotFound(
                f"{self._root}: more than {_MOST_VISITS} links lead to {folder};"
                " name the checkpoint itself"
            )
        with os.scandir(folder) as entries:
            names = list(islice(entries, _MOST_ENTRIES + 1 - self._total))
        self._total += len(names)
        self._entries[head.partition("/")[0]] += len(names)
        if self._total > _MOST_ENTRIES:
            largest, _ = self._entries.most_common(1)[0]
            raise NotFound(
                f"{self._root}: more than {_MOST_ENTRIES:,} files and folders, most of them in"
                f" {largest or 'it'}",
                hint="name the checkpoint itself" + (f", or move {largest} away" * bool(largest)),
            )
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
            if entry.name.endswith(_FILES_ONLY):
                self.unlisted[name] = Problem("a folder, not a file", NO_FILE)
            if depth > 0:
                self._enter(name + "/", parents, depth - 1)
            elif not self._near:
                self.unlisted[name] = Problem(_TOO_DEEP, "file-unreadable")
        elif entry.is_file():
            self.files[name] = FileStatus.of(entry.stat())
        else:
            os.stat(entry.path)  # fails for a dangling link, or a removed entry
            self.unlisted[name] = Problem("not a file (pipe, socket or device)", NO_FILE)


def within_folder(files: Mapping[str, _T], folder: str) -> dict[str, _T]:
    """Return the files below a folder, by their paths relative to it."""
    head = folder + "/"
    return {name[len(head) :]: what for name, what in files.items() if name.startswith(head)}


def lies_in(name: str, folders: Set[str]) -> bool:
    """Return whether a file or folder lies in one of some folders, at any depth."""
    ends = (at for at, letter in enumerate(name) if letter == "/")
    return any(name[:end] in folders for end in ends)


def by_folder(files: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Return the files below every folder, at any depth, by the folder."""
    grouped: dict[str, dict[str, _T]] = {}
    for name, what in files.items():
        at = name.find("/")
        while at >= 0:
            grouped.setdefault(name[:at], {})[name[at + 1 :]] = what
            at = name.find("/", at + 1)
    return grouped


def entries_by_folder(
    files: Mapping[str, _T], unlisted: Mapping[str, Problem]
) -> dict[str, tuple[dict[str, _T], dict[str, Problem]]]:
    """Return the files, and what could not be listed, below every folder that has either."""
    listed, hidden = by_folder(files), by_folder(unlisted)
    folders = dict.fromkeys([*listed, *hidden])
    return {folder: (listed.get(folder, {}), hidden.get(folder, {})) for folder in folders}
