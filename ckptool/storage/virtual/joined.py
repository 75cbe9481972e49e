"""Several folders of files as one: those of the first as they are, those of others below a name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptool.errors import Problem
from ckptool.storage.file_status import by_folder
from ckptool.storage.files import FileReader, Files, ReadPolicy, ReadSpan, read_exactly


class JoinedFiles:
    """A folder, and ``others`` by name, read as its subfolders.

    A name has no ``/``, and the first folder has nothing that is called so.
    """

    def __init__(self, first: Files, others: Mapping[str, Files]) -> None:
        self._folders = {"": first, **others}
        self.root = ", ".join(files.root for files in self._folders.values())
        self.files: Mapping[str, int] = {
            _path(name, file): size
            for name, files in self._folders.items()
            for file, size in files.files.items()
        }
        self.unlisted: Mapping[str, Problem] = {}
        self.policy = _join([files.policy for files in self._folders.values()])

    def narrowed(self, folder: str) -> Files:
        """Return the part below a subfolder, as a source of its own."""
        name, below = self._find(folder)
        return self._folders[name].narrowed(below) if below else self._folders[name]

    def subfolders(self) -> Mapping[str, Files]:
        """Return every folder below, at any depth, as a source of its own."""
        return {folder: self.narrowed(folder) for folder in by_folder(self.files)}

    def alone(self, name: str) -> Files:
        """Return one of the files alone."""
        folder, file = self._find(name)
        return self._folders[folder].alone(file)

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return a SHA-256 (hex) that changes with the files."""
        digest = hashlib.sha256()
        for name, own in self._by_folder(files):
            digest.update(f"{name}\0{self._folders[name].fingerprint(own, exact=exact)}\n".encode())
        return digest.hexdigest()

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return those files that were written, replaced or removed since listed."""
        return [
            _path(name, file)
            for name, own in self._by_folder(files)
            for file in self._folders[name].changed(own)
        ]

    def modified(self, file: str) -> float:
        """Return when a file was last modified, in seconds since the epoch; 0 if unknown."""
        name, own = self._find(file)
        return self._folders[name].modified(own)

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Prepare for the next reads: file, offset and bytes of each."""
        for name, own in self._spans_by_folder(spans).items():
            self._folders[name].expect(own)

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` at ``offset``; Damaged if the file ends before."""
        return read_exactly(self, file, offset, nbytes)

    def plan_reads(self, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        """Prepare for all next reads, in the order of each folder."""
        ends = [
            self._folders[name].plan_reads(own) for name, own in self._spans_by_folder(runs).items()
        ]

        def end() -> None:
            for one in ends:
                one()

        return end

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of what was read, or fetched ahead."""
        for files in self._folders.values():
            files.keep(nbytes // len(self._folders))

    def reader(self) -> JoinedReader:
        """Return a reader for one thread."""
        return JoinedReader(self._folders)

    def _find(self, path: str) -> tuple[str, str]:
        """Return the name of the folder that a path is in, and its path there."""
        return _find(self._folders, path)

    def _by_folder(self, files: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield each folder that has some of the files, and their paths in it."""
        found: dict[str, list[str]] = {}
        for path in files:
            name, file = self._find(path)
            found.setdefault(name, []).append(file)
        return ((name, found[name]) for name in self._folders if name in found)

    def _spans_by_folder(self, spans: Iterable[ReadSpan]) -> dict[str, list[ReadSpan]]:
        found: dict[str, list[ReadSpan]] = {}
        for path, offset, nbytes in spans:
            name, file = self._find(path)
            found.setdefault(name, []).append((file, offset, nbytes))
        return found


class JoinedReader:
    """Positioned reads of the files of several folders for one thread."""

    def __init__(self, folders: Mapping[str, Files]) -> None:
        self._folders = folders
        self._readers: dict[str, FileReader] = {}

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        name, own = _find(self._folders, file)
        self._reader(name).read_into(own, offset, buffer)

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last."""
        name, own = _find(self._folders, file)
        self._reader(name).read_runs(own, offset, step, runs)

    def close(self) -> None:
        """Release all resources."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def _reader(self, name: str) -> FileReader:
        if name not in self._readers:
            self._readers[name] = self._folders[name].reader()
        return self._readers[name]


def _path(name: str, file: str) -> str:
    return f"{name}/{file}" if name else file


def _find(folders: Mapping[str, Files], path: str) -> tuple[str, str]:
    name, slash, file = path.partition("/")
    if slash and name in folders:
        return name, file
    return (path, "") if path in folders else ("", path)


def _join(policies: Sequence[ReadPolicy]) -> ReadPolicy:
    """Return the policy that suits the dearest reads of all."""
    return ReadPolicy(
        tile=max(policy.tile for policy in policies),
        piece=max(policy.piece for policy in policies),
        block=max(policy.block for policy in policies),
        workers=max(policy.workers for policy in policies),
        by_request=any(policy.by_request for policy in policies),
    )
