"""Files that lie in others: the members of an archive, or several folders as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptool.storage.file_status import by_folder, missing, within_folder
from ckptool.storage.files import FileReader, Files, ReadPolicy, ReadSpan, too_short


class Place(NamedTuple):
    """Where the bytes of a file lie: in the file ``name`` of a ``holder``, from an offset on."""

    holder: Files
    name: str
    offset: int
    nbytes: int


class PlacedFiles(Files):
    """Files that lie in those of one holder or of several, readable at any offset."""

    def __init__(self, root: str, places: Mapping[str, Place]) -> None:
        self.root = root
        self.files = {name: place.nbytes for name, place in places.items()}
        self.unlisted = {}
        self._places = places
        self._holders = list(dict.fromkeys(place.holder for place in places.values()))
        self.policy = _dearest([holder.policy for holder in self._holders] or [ReadPolicy()])

    def narrowed(self, folder: str) -> PlacedFiles:
        """Return the part below a subfolder, as a source of its own."""
        return PlacedFiles(f"{self.root}/{folder}", within_folder(self._places, folder))

    def subfolders(self) -> dict[str, PlacedFiles]:
        """Return every folder below, at any depth, as a source of its own."""
        grouped = by_folder(self._places).items()
        return {folder: PlacedFiles(f"{self.root}/{folder}", places) for folder, places in grouped}

    def alone(self, name: str) -> PlacedFiles:
        """Return one of the files alone."""
        folder, slash, last = name.rpartition("/")
        return PlacedFiles(f"{self.root}{slash}{folder}", {last: self._places[name]})

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return a SHA-256 (hex) that changes with what the files lie in."""
        import hashlib  # takes 3 ms, and only writing needs it

        digest = hashlib.sha256()
        for holder, names in self._by_holder(files).items():
            digest.update(holder.fingerprint(dict.fromkeys(names), exact=exact).encode())
        return digest.hexdigest()

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return those files whose holder's file was written, replaced or removed."""
        members = [name for name in files if name in self._places]
        pairs = self._by_holder(members).items()
        changes = {(holder, name) for holder, names in pairs for name in holder.changed(names)}
        return [name for name in members if self._places[name][:2] in changes]

    def modified(self, file: str) -> float:
        """Return when a file was last modified, in seconds since the epoch; 0 if unknown."""
        place = self._places[file]
        return place.holder.modified(place.name)

    def expect(self, spans: Iterable[ReadSpan]) -> None:
        """Prepare for the next reads."""
        for holder, runs in self._spans_by_holder(spans).items():
            holder.expect(runs)

    def plan_reads(self, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        """Prepare for all next reads, in the order of each holder."""
        planned = self._spans_by_holder(runs).items()
        ends = [holder.plan_reads(inside) for holder, inside in planned]

        def end() -> None:
            for finish in ends:
                finish()

        return end

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of what was read, or fetched ahead."""
        for holder in self._holders:
            holder.keep(nbytes // len(self._holders))

    def reader(self) -> PlacedReader:
        """Return a reader for one thread."""
        return PlacedReader(self._places)

    def _by_holder(self, files: Iterable[str]) -> dict[Files, list[str]]:
        """Return the files of each holder that some of these files lie in, in its order."""
        # in the order of the holders, whatever that of the names: digests must not depend on it
        names_by_holder: dict[Files, list[str]] = {holder: [] for holder in self._holders}
        for name in files:
            place = self._places[name]
            names_by_holder[place.holder].append(place.name)
        return {holder: names for holder, names in names_by_holder.items() if names}

    def _spans_by_holder(self, spans: Iterable[ReadSpan]) -> dict[Files, list[ReadSpan]]:
        runs: dict[Files, list[ReadSpan]] = {}
        for file, offset, nbytes in spans:
            place = self._places[file]
            runs.setdefault(place.holder, []).append((place.name, place.offset + offset, nbytes))
        return runs


class PlacedReader:
    """Positioned reads for one thread, never past a file's end."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._readers: dict[Files, FileReader] = {}

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        reader, name, start = self._find(file, offset, buffer.nbytes)
        reader.read_into(name, start, buffer)

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last."""
        if runs:
            nbytes = step * (len(runs) - 1) + runs[-1].nbytes
            reader, name, start = self._find(file, offset, nbytes)
            reader.read_runs(name, start, step, runs)

    def close(self) -> None:
        """Release all resources."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _find(self, file: str, offset: int, nbytes: int) -> tuple[FileReader, str, int]:
        """Return what reads some bytes of a file, and where they are."""
        place = self._places.get(file)
        if place is None:
            raise missing(file)
        if offset < 0 or offset + nbytes > place.nbytes:
            raise too_short(file, offset, nbytes, place.nbytes)
        reader = self._readers.get(place.holder)
        if reader is None:
            reader = self._readers[place.holder] = place.holder.reader()
        return reader, place.name, place.offset + offset


def join_folders(first: Files, subfolders: Mapping[str, Files]) -> PlacedFiles:
    """Return a folder with more ``subfolders``, by names that none of its own has."""
    places = places_in(first)
    for folder, files in subfolders.items():
        places |= places_in(files, f"{folder}/")
    roots = [first.root, *(files.root for files in subfolders.values())]
    return PlacedFiles(", ".join(roots), places)


def places_in(files: Files, head: str = "") -> dict[str, Place]:
    """Return where some files lie by themselves, by their names after a ``head``."""
    return {f"{head}{name}": Place(files, name, 0, size) for name, size in files.files.items()}


def _dearest(policies: Sequence[ReadPolicy]) -> ReadPolicy:
    """Return the policy that suits the dearest reads of all."""
    return ReadPolicy(
        tile=max(policy.tile for policy in policies),
        block=max(policy.block for policy in policies),
        workers=max(policy.workers for policy in policies),
        by_request=any(policy.by_request for policy in policies),
    )
