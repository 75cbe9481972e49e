"""Folders and files to read from; here those of a disk."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Protocol, TypeVar

from ckptool.errors import Damaged, NotFound, Problem
from ckptool.storage.commit_note import side_file, side_name
from ckptool.storage.file_status import DEPTH, FileStatus, Walk, changed, status_now

_T = TypeVar("_T")

SPAN = 4 << 20
"""Bytes that are read at once to gather elements that lie apart."""
TILE = 1 << 20
"""Bytes that are moved at a time on a disk, as long as one element is not larger."""
CORES = min(8, os.cpu_count() or 1)
"""Threads that read a disk: more only wait for each other, its reads are the kernel's to order."""


class Bytes(Protocol):
    """What one thread reads with."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged where the file ends before."""

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last."""

    def close(self) -> None:
        """Give back what is held."""


class Files(Protocol):
    """A folder of files, or some of them, wherever it lies.

    ``tile`` is how many bytes are moved at a time, ``piece`` how many are read at once, ``block``
    those that a read costs at least: gaps shorter than it are read over. ``workers`` is how many
    threads move its bytes best, unless a user says it.
    """

    @property
    def root(self) -> str:
        """The folder, as the user would name it."""

    @property
    def files(self) -> Mapping[str, int]:
        """Every file by its relative path with ``/``, and its size in bytes."""

    @property
    def unlisted(self) -> Mapping[str, Problem]:
        """Why files and folders below are not in ``files`` nor what they hold, by their paths."""

    @property
    def tile(self) -> int: ...
    @property
    def piece(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def workers(self) -> int: ...

    def narrowed(self, folder: str) -> Files:
        """The part below a subfolder, as a source of its own."""

    def subfolders(self) -> Mapping[str, Files]:
        """Every folder below, at any depth, as a source of its own."""

    def alone(self, name: str) -> Files:
        """One of the files by itself, with the ``.extra.pt`` file beside it."""

    def fingerprint(self, files: Iterable[str]) -> str:
        """A SHA-256 over what changes when some of the files do, as they were listed."""

    def changed(self, files: Iterable[str]) -> list[str]:
        """Those of the files that were written, replaced or removed since they were listed."""

    def modified(self, file: str) -> float:
        """When a file was last modified, in seconds since the epoch."""

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """What is read next: file, offset and bytes of each."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` at ``offset``; Damaged where the file ends before."""

    def keep(self, nbytes: int) -> None:
        """Keep no more than so many bytes of what was read."""

    def reader(self) -> Bytes:
        """What one thread reads with."""


class LocalSource:
    """A local folder, or some of its files, readable at any offset.

    ``files`` maps relative paths to sizes in bytes, ``listed`` to what each file was when it was
    listed: one that is another when it is opened is not read. ``places`` are those of them that lie
    elsewhere below the root, ``unlisted`` what could not be looked at, and why. Links are followed;
    a loop of them ends the walk where it closes.
    """

    tile = TILE
    piece = 1 << 19  # read, checked and written while the processor's cache holds it
    block = 1
    workers = CORES

    def __init__(
        self,
        root: Path,
        files: Mapping[str, int],
        listed: Mapping[str, FileStatus] | None = None,
        places: Mapping[str, str] | None = None,
        unlisted: Mapping[str, Problem] | None = None,
    ) -> None:
        self.root = str(root)
        self.files = files
        self.unlisted = unlisted or {}
        self._listed = listed or {}
        self._places = places or {}

    @classmethod
    def of(
        cls, root: Path, listed: Mapping[str, FileStatus], unlisted: Mapping[str, Problem]
    ) -> LocalSource:
        """Return files of a folder as they were listed."""
        sizes = {name: status.nbytes for name, status in listed.items()}
        return cls(root, sizes, listed, unlisted=unlisted)

    @classmethod
    def folder(cls, root: Path) -> LocalSource:
        """Everything below ``root``; ``unlisted`` names the folders that lie too deep."""
        walk = Walk(root)
        try:
            walk.enter("", (), DEPTH)
        except OSError as error:
            raise NotFound(f"{root}: cannot be listed: {error.strerror}") from None
        return cls.of(root, dict(sorted(walk.files.items())), dict(sorted(walk.unlisted.items())))

    @classmethod
    def file(cls, path: Path) -> LocalSource:
        """One file by itself; with a safetensors file goes the ``.extra.pt`` file beside it."""
        listed, places = {path.name: _status(path)}, {}
        side = side_file(path)
        if side is not None:
            name = str(side_name(path.name))
            listed[name] = _status(side)
            places[name] = str(side.relative_to(path.parent))
        sizes = {name: status.nbytes for name, status in listed.items()}
        return cls(path.parent, sizes, listed, places)

    def narrowed(self, folder: str) -> LocalSource:
        """The part below a subfolder, as a source of its own."""
        listed = within_folder(self._listed, folder)
        return LocalSource.of(Path(self.root, folder), listed, within_folder(self.unlisted, folder))

    def subfolders(self) -> dict[str, LocalSource]:
        """Every folder below, at any depth, as a source of its own."""
        listed, unlisted = by_folder(self._listed), by_folder(self.unlisted)
        return {
            name: LocalSource.of(
                Path(self.root, name), listed.get(name, {}), unlisted.get(name, {})
            )
            for name in dict.fromkeys([*listed, *unlisted])
        }

    def alone(self, name: str) -> LocalSource:
        """One of the files by itself, with the ``.extra.pt`` file beside it."""
        return LocalSource.file(Path(self.root, name))

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """A disk needs no notice."""

    def keep(self, nbytes: int) -> None:
        """The kernel keeps what was read of a disk."""

    def reader(self) -> Reader:
        """What one thread reads with."""
        return Reader(self.root, self._listed, self._places)

    def fingerprint(self, files: Iterable[str]) -> str:
        """A SHA-256 over names, sizes and modification times of some files, as they were listed."""
        found = hashlib.sha256()
        for name in sorted(files):
            status = self._listed.get(name)
            if status is None:
                raise missing(name)
            found.update(repr((name, status.nbytes, status.modified)).encode())
        return found.hexdigest()

    def changed(self, files: Iterable[str]) -> list[str]:
        """Those of the files that were written, replaced or removed since they were listed."""
        found = []
        for name in files:
            before = self._listed.get(name)
            now = None if before is None else status_now(self._path(name))
            if before is not None and (now is None or not now.has_content_of(before)):
                found.append(name)
        return found

    def modified(self, file: str) -> float:
        """When a file was last modified, in seconds since the epoch."""
        return _status(Path(self._path(file))).modified / 1e9

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` at ``offset``; Damaged where the file ends before."""
        if file not in self.files:
            raise missing(file)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.files[file]:
            raise too_short(file, offset, nbytes, self.files[file])
        data = bytearray(nbytes)
        descriptor = _opened(self._path(file), file, self._listed.get(file))
        try:
            _read_into(descriptor, file, offset, memoryview(data))
        finally:
            os.close(descriptor)
        return bytes(data)

    def _path(self, file: str) -> str:
        return f"{self.root}/{self._places.get(file, file)}"


def within_folder(files: Mapping[str, _T], folder: str) -> dict[str, _T]:
    """The files below a folder, by their paths relative to it."""
    head = folder + "/"
    return {name[len(head) :]: what for name, what in files.items() if name.startswith(head)}


def by_folder(files: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """For every folder, at any depth, the files below it."""
    grouped: dict[str, dict[str, _T]] = {}
    for name, what in files.items():
        at = name.find("/")
        while at >= 0:
            grouped.setdefault(name[:at], {})[name[at + 1 :]] = what
            at = name.find("/", at + 1)
    return grouped


def pieces(reader: Bytes, file: str, nbytes: int, at_once: int) -> Iterator[memoryview]:
    """A file of ``nbytes`` from its beginning, each piece until the next is asked for."""
    buffer = memoryview(bytearray(min(at_once, nbytes)))
    for start in range(0, nbytes, at_once):
        piece = buffer[: min(at_once, nbytes - start)]
        reader.read_into(file, start, piece)
        yield piece


def missing(file: str) -> Damaged:
    return Damaged(f"{file}: the file is missing", "file-missing", file=file)


def unreadable(file: str, error: OSError) -> NotFound:
    return NotFound(f"{file}: cannot be read: {error.strerror}", "file-unreadable", file=file)


def too_short(file: str, offset: int, nbytes: int, size: int) -> Damaged:
    return Damaged(
        f"{file}: {nbytes:,} bytes are expected at offset {offset:,}, but the file has"
        f" {size:,} bytes; it is truncated or its metadata is wrong",
        "file-truncated",
        file=file,
        end=offset + nbytes,
    )


def _status(path: Path) -> FileStatus:
    try:
        return FileStatus.of(path.stat())
    except OSError as error:
        raise unreadable(str(path), error) from None


def _opened(path: str, file: str, listed: FileStatus | None) -> int:
    """A descriptor to read from, of the file that was listed. Changed where it is another.

    A pipe that took the place of a file must not block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        if listed is None or FileStatus.of(os.fstat(descriptor)).has_content_of(listed):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        raise unreadable(file, error) from None
    os.close(descriptor)
    raise changed([file])


def _read_into(descriptor: int, file: str, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise unreadable(file, error) from None
        if count == 0:
            raise too_short(file, offset, len(buffer), offset + done)
        done += count


class Reader:
    """Positioned reads for one thread, with a bounded number of open files.

    A file that is not as it was ``listed`` is not read.
    """

    def __init__(
        self,
        root: str,
        listed: Mapping[str, FileStatus] | None = None,
        places: Mapping[str, str] | None = None,
        limit: int = 64,
    ) -> None:
        self._root = root
        self._listed = listed or {}
        self._places = places or {}
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged where the file ends before."""
        _read_into(self._descriptor(file), file, offset, buffer)

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last.

        The disk is told of them all before: it then reads them as one.
        """
        descriptor = self._descriptor(file)
        offsets = range(offset, offset + step * len(runs), step)
        try:
            os.posix_fadvise(descriptor, offset, step * len(runs), os.POSIX_FADV_WILLNEED)
            counts = list(map(os.preadv, repeat(descriptor), zip(runs, strict=False), offsets))
        except OSError as error:
            raise unreadable(file, error) from None
        if sum(counts) < sum(map(len, runs)):
            for run, start in zip(runs, offsets, strict=True):
                self.read_into(file, start, run)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, file: str) -> int:
        descriptor = self._open.get(file)
        if descriptor is not None:
            self._open.move_to_end(file)
            return descriptor
        if len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        path = f"{self._root}/{self._places.get(file, file)}"
        descriptor = self._open[file] = _opened(path, file, self._listed.get(file))
        return descriptor
