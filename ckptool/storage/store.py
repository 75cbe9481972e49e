"""A store that fsspec knows: list, read and write it, with retries.

The web lists nothing: the files of a checkpoint there are those that its metadata names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakMethod, WeakSet

from msgspec import Struct, field

from ckptool.errors import Changed, Denied, NotFound, Unsupported
from ckptool.storage.block_cache import CAPACITY, BlockCache, ObjectVersion
from ckptool.storage.clients.checked_ranges import is_pinned
from ckptool.storage.clients.file_system import open_file_system
from ckptool.storage.clients.obstore_client import StoreClient, by_obstore_alone
from ckptool.storage.clients.obstore_others import by_obstore
from ckptool.storage.clients.ranged_read import FsspecClient, FsspecReader
from ckptool.storage.clients.unlisted import INDEXES, infos, is_file, names_below
from ckptool.storage.planned_ranges import PlannedRanges
from ckptool.storage.retry import RetryPolicy, Unaccepted, retry, status_of
from ckptool.storage.url import AZURE, GOOGLE, S3, WEB, redact_url

_T = TypeVar("_T")
_P = ParamSpec("_P")
_BEHIND_THE_END = 416
_ANOTHER_VERSION = 412
_VERSIONS = ("generation", "ETag", "etag", "md5Hash", "sha256", "blob_id", "Last-Modified")
"""The clients' keys for a value that differs between versions of a file; Google's first."""
_ATOMIC_PUT = {*S3, *GOOGLE, *AZURE, "hf"}


class ObjectInfo(NamedTuple):
    """A file of a store: its size in bytes, and its version (an ETag or a time)."""

    nbytes: int
    version: str
    modified: float


class Traffic(Struct):
    """The requests to a store, and the bytes received."""

    requests: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, received: int = 0) -> None:
        """Count one more request, which returned so many bytes."""
        with self._lock:
            self.requests += 1
            self.received += received


class Store:
    """A store, or a file system of fsspec. ``traffic`` counts its requests.

    ``options`` are the file system's own; it handles credentials, which appear in no message. A
    process that was forked, or gets a store by pickle, opens its own connections.
    """

    policy = RetryPolicy()

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.scheme = url.partition("://")[0].lower()
        self.traffic = Traffic()
        self.remains: dict[str, int] = {}
        """Bytes of unfinished files, by URL, that could not be discarded."""
        self.blocks = BlockCache(_weakly(self.read))
        self.ranges = PlannedRanges(_weakly(self.read))
        self._url = url
        self._options = options
        self._sizes: dict[str, int] = {}
        self._named: set[str] = set()
        """Folders whose metadata file was given: they may not be listable."""
        self._hidden: dict[str, str] = {}
        """Why the store does not say whether files are there, by key."""
        self._fs: Any = None
        self._client: StoreClient | None = None
        self._others: StoreClient | None = None
        _stores.add(self)

    def __reduce__(self) -> tuple[type[Store], tuple[str, Mapping[str, Any]]]:
        return Store, (self._url, dict(self._options))

    @classmethod
    def connect(cls, url: str, options: Mapping[str, Any]) -> Store:
        """Connect to the store of a URL; Unsupported if a package for it is missing."""
        store = cls(url, options)
        store.client  # noqa: B018 (connects)
        return store

    @property
    def client(self) -> StoreClient:
        """The client that lists and reads the store, connected on first use."""
        if self._client is None:
            others, timeout = _weakly(self._by_fsspec), self.policy.timeout
            alone = by_obstore_alone(self.scheme, self._options, others, timeout)
            self._client = alone or self._by_fsspec()
        return self._client

    @property
    def fs(self) -> Any:
        """The file system of fsspec, which writes and removes: opened on first use."""
        if self._fs is None:
            self._fs = open_file_system(self._url, self._options)
        return self._fs

    def _by_fsspec(self) -> StoreClient:
        """Return the client that lists and reads with the file system."""
        if self._others is None:
            fs, timeout = self.fs, self.policy.timeout
            reader = FsspecReader(fs, self.scheme, self._sizes, timeout)
            ranges = by_obstore(fs, self.scheme, reader, timeout)
            self._others = FsspecClient(fs, ranges, timeout)
        return self._others

    def disconnect(self) -> None:
        """Drop all connections, locks and pending requests: they are another process's."""
        self._fs = self._client = self._others = None
        self.blocks = BlockCache(_weakly(self.read), self.blocks.capacity)
        self.ranges = PlannedRanges(_weakly(self.read), self.ranges.capacity)
        self.traffic = Traffic(self.traffic.requests, self.traffic.received)

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of what was read, or is fetched ahead."""
        self.blocks.capacity = min(CAPACITY, nbytes // 4)
        self.ranges.capacity = nbytes - self.blocks.capacity

    @property
    def atomic_put(self) -> bool:
        """Whether an object appears only once it is complete."""
        return self.scheme in _ATOMIC_PUT

    def key(self, url: str) -> str:
        """Return the file system's name for the place of a URL."""
        if self.scheme in S3:
            return url.partition("://")[2].strip("/")
        return str(self.fs._strip_protocol(url))

    def changed(self, key: str, nbytes: int) -> None:
        """Drop what was read of a file: it was written, and has so many bytes."""
        self._sizes[key] = nbytes
        self.blocks.clear()
        self.ranges.clear()

    def listed_size(self, key: str) -> int:
        """Return the bytes of a file as it was last listed or written, 0 if it was not."""
        return self._sizes.get(key, 0)

    def url(self, key: str) -> str:
        """Return a place of the store as shown in messages."""
        if self.scheme in S3:
            return redact_url(f"s3://{key}")
        return redact_url(self.fs.unstrip_protocol(key))

    def find(self, key: str, what: str) -> dict[str, ObjectInfo]:
        """Return all files below a place by their relative paths; a file itself is ``""``.

        Raises NotFound if there is none, or it cannot be listed; errors name it ``what``.
        """
        infos = self._list_web(key) if self.scheme in WEB else self._list_files(key, what)
        files = {}
        for name, info in infos.items():
            relative = "" if name == key else name.removeprefix(key).lstrip("/")
            if info.get("type", "file") == "file" and not name.endswith("/"):
                files[relative] = _info(info)
                self._sizes[name] = files[relative].nbytes
        if not files:
            raise NotFound(f"{what}: no such file or folder")
        folder, _, name = key.rpartition("/")
        if "" in files and name in INDEXES:
            self._named.add(folder)
        return dict(sorted(files.items()))

    def _list_files(self, key: str, what: str) -> dict[str, Any]:
        """Return a file of S3 if the name is a file's, or what a listing shows.

        A file may have the name of a folder there; one request shows it, a listing takes two more.
        If there is no such file, s3fs (2024.6 to 2026.9) looks for a folder.
        """
        if self.scheme in S3 and is_file(key) and key.rpartition("/")[2] not in INDEXES:
            self.traffic.count()
            try:
                info = self.ask(what, lambda: self.client.info(key))
            except Unaccepted:
                raise
            except Denied:  # S3's answer for missing keys without permission to list
                return self._list(key, what)
            if info["type"] == "file":
                return {key: info}
        return self._list(key, what)

    def _list(self, key: str, what: str) -> dict[str, Any]:
        self.traffic.count()
        policy = self.policy.of_listings()
        try:
            infos = retry(policy, what, lambda: self.client.find(key))
        except Unaccepted:
            raise
        except Denied as error:
            return self._look_up(key, what, error)
        if isinstance(infos, Mapping):
            return dict(infos)
        # adlfs (2024.7 to 2026.8) has no details of a file requested by name
        return {name: self.ask(what, partial(self.client.info, name)) for name in infos}

    def _look_up(self, key: str, what: str, error: Denied) -> dict[str, Any]:
        """Return what can be known if listing is denied: a metadata file, and files that it names.

        A store that denies listing does not reveal either that a file is missing.
        """
        if key in self._named:
            return self._list_named(key, "")
        if key.rpartition("/")[2] not in INDEXES:
            hint = f"give its metadata file, which needs no listing: {what}/{INDEXES[0]}"
            hint = f"{error.hint}; or {hint}" if error.hint else hint
            raise Denied(f"{error}", hint) from None
        info = self._head(key)
        if info is None:
            raise error
        return {key: info}

    def _head(self, key: str) -> dict[str, Any] | None:
        """Return the store's information on a file; None if it is missing, or not shown."""
        self.traffic.count()
        try:
            return retry(self.policy.of_listings(), self.url(key), lambda: self.client.info(key))
        except Unaccepted:
            raise
        except Denied as error:
            self._hidden[key] = str(error)
        except NotFound:
            pass
        return None

    def hidden_below(self, key: str) -> dict[str, str]:
        """Return why files below a place are not shown, by their relative paths.

        Where listing is denied, a store does not say either that a file is missing.
        """
        head = f"{key}/"
        hidden = self._hidden.items()
        return {name.removeprefix(head): why for name, why in hidden if name.startswith(head)}

    def _list_named(self, folder: str, query: str) -> dict[str, Any]:
        """Return the files of a folder that cannot be listed, as far as they can be known."""
        look = self._web_info if self.scheme in WEB else self._head

        def key_of(name: str) -> str:
            return f"{folder}/{name}{query}"

        def info_of(name: str) -> dict[str, Any] | None:
            return look(key_of(name))

        names = names_below(info_of, lambda name: self.get(key_of(name), key_of(name)))
        known = infos(names, info_of)
        return {f"{folder}/{name}": info for name, info in known.items()}

    def _list_web(self, key: str) -> dict[str, Any]:
        """Return a file, or the files of a folder as far as they can be known."""
        head, mark, query = key.partition("?")
        if is_file(key):
            return {key: info} if (info := self._web_info(key)) is not None else {}
        return self._list_named(head.rstrip("/"), mark + query)

    def _web_info(self, key: str) -> dict[str, Any] | None:
        """Return the server's information on a file, at least its size; None if there is none."""
        self.traffic.count()
        policy = self.policy.of_listings()
        try:
            info = retry(policy, redact_url(key), lambda: self.client.info(key))
        except NotFound:
            return None
        if info["size"] is None:
            raise Unsupported(f"{redact_url(key)}: the server does not say how large it is")
        return info

    def read_into(self, file: ObjectVersion, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` of a file; return the bytes there are.

        Raises Changed if the store knows that it is no longer the file that was listed.
        """
        done = self.ranges.read_into(file, offset, buffer)
        return self.blocks.read_into(file, offset, buffer) if done is None else done

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes of a file from ``start`` to ``end``, fewer if it ends before.

        Raises Changed if the store knows that it is no longer the file that was listed.
        """
        end = min(end, self._sizes.get(file.key, end))
        if start >= end:
            return memoryview(b"")
        what = f"{self.url(file.key)}: bytes {start:,} to {end:,}"
        return self.ask(what, lambda: self._range(file, start, end))

    def _range(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Send one ranged request; OSError if fewer bytes came than exist, or more."""
        key = file.key
        try:
            data = self.client.read(file, start, end)
        except Exception as error:
            if status_of(error) == _ANOTHER_VERSION:
                raise Changed(f"{self.url(key)}: it was replaced while it was read") from None
            if status_of(error) != _BEHIND_THE_END:
                raise
            data = memoryview(b"")
        self.traffic.count(len(data))
        if len(data) > end - start:
            raise OSError(f"{len(data):,} bytes received, {end - start:,} requested")
        if len(data) < end - start and self._size_now(key) > start + len(data):
            raise OSError(f"only {len(data):,} bytes received")
        return data

    def _size_now(self, key: str) -> int:
        """Return the current size of a file, not the listed one."""
        return int(self.client.info(key)["size"] or 0)

    def reads_version(self, version: str) -> bool:
        """Return whether a read that names this version fails if another is there."""
        return is_pinned(self.scheme, version)

    def make_folder(self, key: str, what: str) -> None:
        """Make a folder if the store has folders."""
        self.ask(what, lambda: self.fs.makedirs(key, exist_ok=True))

    def put(self, key: str, data: bytes, what: str) -> None:
        """Write a small file."""
        self.ask(what, lambda: self.fs.pipe_file(key, data))

    def get(self, key: str, what: str) -> bytes:
        """Return all of a small file; NotFound if there is none."""
        data = bytes(self.ask(what, lambda: self.client.get(key)))
        self.traffic.count(len(data))
        return data

    def remove(self, keys: Iterable[str], what: str) -> None:
        """Remove those files that exist, one after the other."""
        for key in keys:
            with suppress(NotFound):
                self.ask(what, partial(self.fs.rm_file, key))

    def ask(self, what: str, work: Callable[[], _T]) -> _T:
        """Return the answer to a request; NotFound or NoAnswer if there is none."""
        return retry(self.policy, what, work)


def _weakly(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a method with a weak reference to its store: no cycle keeps its connections."""
    held = WeakMethod(method)

    def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
        known = held()
        if known is None:
            raise ReferenceError("the store is no longer open")
        return known(*arguments, **named)

    return call


_stores: WeakSet[Store] = WeakSet()


def _disconnect_all() -> None:
    for store in list(_stores):
        store.disconnect()


os.register_at_fork(after_in_child=_disconnect_all)


def _info(info: dict[str, Any]) -> ObjectInfo:
    version = next(filter(None, map(info.get, _VERSIONS)), None)
    modified = info.get("LastModified") or info.get("last_modified") or info.get("mtime")
    modified = modified or info.get("updated") or info.get("created") or 0
    seconds = modified.timestamp() if hasattr(modified, "timestamp") else modified
    seconds = seconds if isinstance(seconds, int | float) else 0
    return ObjectInfo(int(info.get("size") or 0), str(version or modified), float(seconds))
