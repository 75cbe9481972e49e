"""Files of a store to read from: one listing, and ranged reads that are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptool.errors import Changed, Denied, NotFound, Problem
from ckptool.storage.block_cache import BLOCK
from ckptool.storage.clients.client import ObjectInfo, ObjectVersion
from ckptool.storage.clients.retry import Unaccepted
from ckptool.storage.clients.schemes import WEB
from ckptool.storage.commit_note import side_name
from ckptool.storage.file_status import (
    changed,
    entries_by_folder,
    version_digest,
    within_folder,
)
from ckptool.storage.files import CORES, FileReader, Files, ReadPolicy, ReadSpan, too_short
from ckptool.storage.planned_ranges import VersionSpan
from ckptool.storage.url import RemotePath

_FEW = 2
"""Files that are requested one by one: a single file, and its side file."""


class RemoteSource(Files, FileReader):
    """A folder of a store, or some of its files, readable at any offset.

    ``files`` maps relative paths to sizes in bytes, from the one listing; ``unlisted`` says why the
    store does not show others. Narrowed sources share what was read.
    """

    # other threads wait for answers: these check and write what is fetched ahead
    policy = ReadPolicy(2 << 20, BLOCK, max(4, CORES), by_request=True)

    def __init__(
        self,
        place: RemotePath,
        infos: Mapping[str, ObjectInfo],
        unlisted: Mapping[str, Problem] | None = None,
    ) -> None:
        self.root = str(place)
        self.files = {name: info.nbytes for name, info in infos.items()}
        self.unlisted = unlisted or {}
        self._place = place
        self._infos = infos

    @classmethod
    def folder(cls, place: RemotePath) -> RemoteSource:
        """Return everything below a place."""
        files = {name: info for name, info in place.listing.items() if name}
        hidden = place.store.hidden_below(place.key)
        return cls(place, files, {name: Problem(why, Denied.code) for name, why in hidden.items()})

    @classmethod
    def file(cls, place: RemotePath) -> RemoteSource:
        """Return one file alone, with the ``.extra.pt`` file beside a safetensors file."""
        infos, unlisted = {place.name: place.listing[""]}, {}
        if (side := side_name(place.name)) is not None:
            try:
                if (info := place.with_name(side).file_now()) is not None:
                    infos[side] = info
            except Unaccepted:
                raise
            except Denied as error:
                unlisted[side] = Problem(f"{error}", error.code)
        return cls(place.parent, infos, unlisted)

    def alone(self, name: str) -> RemoteSource:
        """Return one of the files alone, with the ``.extra.pt`` file beside it."""
        side = side_name(name) or ""
        folder, _, _ = name.rpartition("/")
        chosen = {file: self._infos[file] for file in (name, side) if file in self._infos}
        hidden = {file: self.unlisted[file] for file in (side,) if file in self.unlisted}
        source = RemoteSource(self._place, chosen, hidden)
        return source.narrowed(folder) if folder else source

    def narrowed(self, folder: str) -> RemoteSource:
        """Return the part below a subfolder, as a source of its own."""
        infos, unlisted = within_folder(self._infos, folder), within_folder(self.unlisted, folder)
        return RemoteSource(self._place / folder, infos, unlisted)

    def subfolders(self) -> dict[str, RemoteSource]:
        """Return every folder below, at any depth, as a source of its own."""
        folders = entries_by_folder(self._infos, self.unlisted)
        return {name: RemoteSource(self._place / name, *inside) for name, inside in folders.items()}

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return a SHA-256 (hex) over names, sizes and versions (ETags or times) of some files."""
        return version_digest(self._infos, files)

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return those files that were replaced or removed since they were listed.

        Nothing is asked if every read names the version that was listed.
        """
        infos = {name: self._infos[name] for name in files if name in self._infos}
        store = self._place.store
        names = [name for name, info in infos.items() if not store.reads_version(info.version)]
        now = self._listed_now(names)
        return [name for name in names if now.get(name) != infos[name]]

    def _listed_now(self, files: Sequence[str]) -> Mapping[str, ObjectInfo]:
        """Return some of the files as the store lists them now."""
        store = self._place.store
        if len(files) > _FEW and store.scheme not in WEB:
            return store.find(self._place.key, self.root)
        infos = {name: (self._place / name).file_now() for name in files}
        return {name: info for name, info in infos.items() if info is not None}

    def modified(self, file: str) -> float:
        """Return when a file was last modified, in seconds since the epoch; 0 if unknown."""
        return self._infos[file].modified

    def expect(self, spans: Iterable[ReadSpan]) -> None:
        """Fetch the next reads ahead, unless they are planned."""
        self._place.store.expect(self._add_versions(spans))

    def plan_reads(self, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        """Fetch the next reads ahead, in order, each byte once and many at a time."""
        return self._place.store.plan(self._add_versions(runs))

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of what was fetched ahead."""
        self._place.store.keep(nbytes)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        try:
            done = self._place.store.read_into(self._version_of(file), offset, buffer)
        except Changed:
            raise changed([file]) from None
        except NotFound as error:
            message = f"{file}: cannot be read: {error.message}"
            problem = Problem(message, "file-unreadable", file=file)
            raise type(error)(problem, hint=error.hint) from None
        if done < len(buffer):
            raise too_short(file, offset, len(buffer), offset + done)

    def reader(self) -> RemoteSource:
        """Return itself: all threads share what was read."""
        return self

    def _add_versions(self, spans: Iterable[ReadSpan]) -> Iterator[VersionSpan]:
        return ((self._version_of(file), offset, nbytes) for file, offset, nbytes in spans)

    def _version_of(self, file: str) -> ObjectVersion:
        """Return a file in the version that was listed; any version of one that was not."""
        info = self._infos.get(file)
        return ObjectVersion((self._place / file).key, info.version if info is not None else "")
