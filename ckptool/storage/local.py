"""Folders and files of a disk to read from."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice, repeat
from pathlib import Path

from ckptool.errors import CkptoolError, NotFound, Problem, refused_hint
from ckptool.storage.commit_note import side_file, side_name
from ckptool.storage.file_status import (
    FileListing,
    FileStatus,
    changed,
    entries_by_folder,
    missing,
    status_now,
    version_digest,
    within_folder,
)
from ckptool.storage.files import (
    Files,
    ReadSpan,
    too_short,
    unreadable,
)
from ckptool.storage.read_ahead import (
    ReadAhead,
    ask_aside,
    ask_in_steps,
    request_missing,
)

_MOST_EXPECTED = 1 << 12
"""Small reads of a disk that are requested together: enough to keep it busy."""
_MOST_OPEN = 64
"""Files that a reader has open at a time."""


class LocalSource(Files):
    """A local folder, or some of its files, readable at any offset.

    ``files`` maps relative paths to sizes in bytes, ``listed`` to the status of each file when
    listed: a file with another status when opened is not read. ``places`` are those that are
    elsewhere below the root, ``unlisted`` those that could not be listed, and why. Links are
    followed, up to a loop.
    """

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
        self.listed = listed or {}
        self._places = places or {}
        self.ahead = ReadAhead()

    @classmethod
    def of(
        cls, root: Path, listed: Mapping[str, FileStatus], unlisted: Mapping[str, Problem]
    ) -> LocalSource:
        """Return files of a folder as they were listed."""
        sizes = {name: status.nbytes for name, status in listed.items()}
        return cls(root, sizes, listed, unlisted=unlisted)

    @classmethod
    def folder(
        cls, root: Path, without: Collection[str] = (), *, near: bool = False
    ) -> LocalSource:
        """List all below ``root`` except some; ``unlisted`` names folders that are too deep.

        With ``near``, list what is in ``root`` and in its own folders.
        """
        listing = FileListing(root, near=near)
        try:
            listing.take()
        except OSError as error:
            message = f"{root}: cannot be listed: {error.strerror}"
            raise NotFound(message, hint=refused_hint(error)) from None
        files, unlisted = sorted(listing.files.items()), sorted(listing.unlisted.items())
        return cls.of(root, {n: s for n, s in files if n not in without}, dict(unlisted))

    @classmethod
    def file(cls, path: Path) -> LocalSource:
        """Return one file alone, with the ``.extra.pt`` file beside a safetensors file."""
        listed, places = {path.name: _status(path)}, {}
        side = side_file(path)
        if side is not None:
            name = str(side_name(path.name))
            listed[name] = _status(side)
            places[name] = str(side.relative_to(path.parent))
        sizes = {name: status.nbytes for name, status in listed.items()}
        return cls(path.parent, sizes, listed, places)

    def narrowed(self, folder: str) -> LocalSource:
        """Return the part below a subfolder, as a source of its own."""
        listed = within_folder(self.listed, folder)
        return LocalSource.of(Path(self.root, folder), listed, within_folder(self.unlisted, folder))

    def subfolders(self) -> dict[str, LocalSource]:
        """Return every folder below, at any depth, as a source of its own."""
        root, folders = Path(self.root), entries_by_folder(self.listed, self.unlisted)
        return {name: LocalSource.of(root / name, *inside) for name, inside in folders.items()}

    def alone(self, name: str) -> LocalSource:
        """Return one of the files alone, with the ``.extra.pt`` file beside it."""
        return LocalSource.file(Path(self.root, name))

    def expect(self, spans: Iterable[ReadSpan]) -> None:
        """Ask the disk for the next reads."""
        with closing(self.reader()) as reader, suppress(CkptoolError, OSError):
            for file, offset, nbytes in islice(spans, _MOST_EXPECTED):
                self.ahead.expect(reader.descriptor(file), file, offset, nbytes)

    def plan_reads(self, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        """Ask the disk for all next reads, in order, a little ahead of them."""

        def asked() -> Generator[int, None, None]:
            with closing(self.reader()) as reader, suppress(CkptoolError, OSError):
                for file, offset, nbytes in runs:
                    yield from ask_in_steps(reader.descriptor(file), offset, offset + nbytes)

        return ask_aside(asked(), self.ahead)

    def reader(self) -> LocalReader:
        """Return a reader for one thread."""
        return LocalReader(self)

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return a SHA-256 (hex) over names, sizes and modification times of some files.

        ``exact``: also over the times of their last change, which nothing sets back.
        """
        import hashlib

        names = sorted(files)
        digest = version_digest(self.listed, names)
        times = [self.listed[name].changed for name in names]
        return hashlib.sha256(repr((digest, times)).encode()).hexdigest() if exact else digest

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return those files that were written, replaced or removed since listed."""
        listed = [(name, self.listed[name]) for name in files if name in self.listed]
        pairs = ((name, old, status_now(self.path(name))) for name, old in listed)
        return [n for n, old, new in pairs if new is None or not new.has_content_of(old)]

    def modified(self, file: str) -> float:
        """Return when a file was last modified, in seconds since the epoch."""
        return _status(Path(self.path(file))).modified / 1e9

    def path(self, file: str) -> str:
        """Return where a file is."""
        return f"{self.root}/{self._places.get(file, file)}"


def _status(path: Path) -> FileStatus:
    try:
        return FileStatus.of(path.stat())
    except OSError as error:
        raise unreadable(str(path), error) from None


def _open(path: str, file: str, listed: FileStatus | None) -> int:
    """Open a file to read, the one that was ``listed``; Changed if it is another.

    A pipe in its place must not block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(file, error) from None
    except ValueError:  # a damaged name, with a null byte
        raise missing(file) from None
    try:
        if listed is None or FileStatus.of(os.fstat(descriptor)).has_content_of(listed):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        raise unreadable(file, error) from None
    os.close(descriptor)
    raise changed([file])


class LocalReader:
    """Positioned reads of a source for one thread, with a bounded number of open files."""

    def __init__(self, source: LocalSource) -> None:
        self._source = source
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        done = 0
        while done < len(buffer):
            count = self.read_some(file, offset + done, buffer[done:])
            if count == 0:
                raise too_short(file, offset, len(buffer), offset + done)
            done += count

    def read_some(self, file: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` up to the end of the file; return how many bytes."""
        descriptor = self.descriptor(file)
        self._source.ahead.begin(descriptor, file, offset, len(buffer))
        try:
            return os.preadv(descriptor, [buffer], offset)
        except OSError as error:
            raise unreadable(file, error) from None

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last.

        Unless they are cached, all are requested first: the kernel then reads them as one.
        """
        descriptor = self.descriptor(file)
        offsets = range(offset, offset + step * len(runs), step)
        try:
            request_missing(descriptor, offset, step * (len(runs) - 1) + len(runs[-1]))
            # zip gives each read a tuple of its one buffer
            counts = list(map(os.preadv, repeat(descriptor), zip(runs, strict=False), offsets))
        except OSError as error:
            raise unreadable(file, error) from None
        if sum(counts) < sum(map(len, runs)):  # one by one, which reads on, or says what is missing
            for run, start in zip(runs, offsets, strict=True):
                self.read_into(file, start, run)

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def descriptor(self, file: str) -> int:
        """Return the descriptor of an open file, which may be closed to make room for others."""
        descriptor = self._descriptors.get(file)
        if descriptor is not None:
            self._descriptors.move_to_end(file)
            return descriptor
        if len(self._descriptors) >= _MOST_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        path, listed = self._source.path(file), self._source.listed.get(file)
        descriptor = self._descriptors[file] = _open(path, file, listed)
        return descriptor
