"""Folders and files to read from; here those of a disk."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Protocol, TypeVar

from ckptool.errors import Damaged, NotFound, Problem

_T = TypeVar("_T")

SPAN = 4 << 20
"""Bytes that are read at once to gather elements that lie apart."""
TILE = 1 << 20
"""Bytes that are moved at a time on a disk, as long as one element is not larger."""
CORES = min(8, os.cpu_count() or 1)
"""Threads that read a disk: more only wait for each other, its reads are the kernel's to order."""
_DEPTH = 8
_MOST_ENTRIES = 200_000
_MOST_VISITS = 200


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
        """A SHA-256 over what changes when some of the files do."""

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

    ``files`` maps relative paths to sizes in bytes. Links are followed; a loop of them ends the
    walk where it closes.
    """

    tile = TILE
    piece = 1 << 19  # read, checked and written while the processor's cache holds it
    block = 1
    workers = CORES

    def __init__(self, root: Path, files: Mapping[str, int]) -> None:
        self.root = str(root)
        self.files = files

    @classmethod
    def folder(cls, root: Path) -> LocalSource:
        """Everything below ``root`` that can be read, eight folders deep."""
        walk = _Walk(root)
        try:
            walk.enter("", (), _DEPTH)
        except OSError as error:
            raise NotFound(f"{root}: cannot be listed: {error.strerror}") from None
        return cls(root, dict(sorted(walk.files.items())))

    @classmethod
    def file(cls, path: Path) -> LocalSource:
        """One file by itself; with a safetensors file goes the ``.extra.pt`` file beside it."""
        try:
            files = {path.name: path.stat().st_size}
        except OSError as error:
            raise unreadable(str(path), error) from None
        extra = path.with_name(path.name.removesuffix(".safetensors") + ".extra.pt")
        if path.suffix == ".safetensors" and os.path.isfile(extra):
            files[extra.name] = extra.stat().st_size
        return cls(path.parent, files)

    def narrowed(self, folder: str) -> LocalSource:
        """The part below a subfolder, as a source of its own."""
        return LocalSource(Path(self.root, folder), within_folder(self.files, folder))

    def subfolders(self) -> dict[str, LocalSource]:
        """Every folder below, at any depth, as a source of its own."""
        grouped = by_folder(self.files)
        return {name: LocalSource(Path(self.root, name), files) for name, files in grouped.items()}

    def alone(self, name: str) -> LocalSource:
        """One of the files by itself, with the ``.extra.pt`` file beside it."""
        return LocalSource.file(Path(self.root, name))

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """A disk needs no notice."""

    def keep(self, nbytes: int) -> None:
        """The kernel keeps what was read of a disk."""

    def reader(self) -> Reader:
        """What one thread reads with."""
        return Reader(self.root)

    def fingerprint(self, files: Iterable[str]) -> str:
        """A SHA-256 over names, sizes and modification times of some of the files."""
        found = hashlib.sha256()
        for name in sorted(files):
            try:
                status = os.stat(Path(self.root, name))
            except OSError as error:
                raise unreadable(name, error) from None
            found.update(repr((name, status.st_size, status.st_mtime_ns)).encode())
        return found.hexdigest()

    def modified(self, file: str) -> float:
        """When a file was last modified, in seconds since the epoch."""
        try:
            return os.stat(Path(self.root, file)).st_mtime
        except OSError as error:
            raise unreadable(file, error) from None

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` at ``offset``; Damaged where the file ends before."""
        if file not in self.files:
            raise missing(file)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.files[file]:
            raise too_short(file, offset, nbytes, self.files[file])
        data = bytearray(nbytes)
        descriptor = _opened(self.root, file)
        try:
            _read_into(descriptor, file, offset, memoryview(data))
        finally:
            os.close(descriptor)
        return bytes(data)


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
    return Damaged(Problem(f"{file}: the file is missing", "file-missing", file=file))


def unreadable(file: str, error: OSError) -> NotFound:
    return NotFound(
        Problem(f"{file}: cannot be read: {error.strerror}", "file-unreadable", file=file)
    )


def too_short(file: str, offset: int, nbytes: int, size: int) -> Damaged:
    return Damaged(
        Problem(
            f"{file}: {nbytes:,} bytes are expected at offset {offset:,}, but the file has"
            f" {size:,} bytes; it is truncated or its metadata is wrong",
            "file-truncated",
            file=file,
        )
    )


def _opened(root: str, file: str) -> int:
    """A descriptor to read from. A pipe that took the place of a file must not block."""
    try:
        return os.open(f"{root}/{file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(file, error) from None


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


class _Walk:
    """The files below ``root``, with a bound on all that is looked at."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, int] = {}
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
            # What vanishes, or is another user's, is not this checkpoint's.
            with suppress(OSError):
                self._note(entry, head, (*parents, identity), depth)

    def _note(
        self, entry: os.DirEntry[str], head: str, parents: tuple[tuple[int, int], ...], depth: int
    ) -> None:
        name = head + entry.name
        if entry.is_dir():
            if depth > 0:
                self.enter(name + "/", parents, depth - 1)
        elif entry.is_file():
            self.files[name] = entry.stat().st_size

    def _count(self) -> bool:
        self._seen += 1
        if self._seen > _MOST_ENTRIES:
            raise NotFound(
                f"{self._root}: more than {_MOST_ENTRIES:,} files and folders;"
                " name the checkpoint itself"
            )
        return True


class Reader:
    """Positioned reads for one thread, with a bounded number of open files."""

    def __init__(self, root: str, limit: int = 64) -> None:
        self._root = root
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
        descriptor = self._open[file] = _opened(self._root, file)
        return descriptor
