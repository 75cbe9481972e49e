"""A store: list, read and write it, with retries, by the client for its scheme.

The web lists nothing: the files of a checkpoint there are those that its metadata names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.errors import Changed, Denied, NotFound, Unsupported
from ckptool.storage.block_cache import CAPACITY, BlockCache
from ckptool.storage.clients.amazon import Amazon
from ckptool.storage.clients.azure import Azure
from ckptool.storage.clients.client import (
    ObjectInfo,
    ObjectVersion,
    PartsRemain,
    Pieces,
    Upload,
)
from ckptool.storage.clients.fsspec_client import FsspecClient, missing
from ckptool.storage.clients.google import Google
from ckptool.storage.clients.obstore_client import ObstoreClient
from ckptool.storage.clients.retry import RetryPolicy, Unaccepted, retry, status_of
from ckptool.storage.clients.schemes import AZURE, GOOGLE, S3, WEB, redact_url, require_accepted
from ckptool.storage.clients.service import Service, fsspec_settings
from ckptool.storage.clients.unlisted import INDEXES, files_below, is_file
from ckptool.storage.clients.web import Web, WebClient
from ckptool.storage.file_status import within_folder
from ckptool.storage.planned_ranges import PlannedRanges, VersionSpan

_Client = ObstoreClient | FsspecClient
"""Whose calls, a request each, raise what ``retry`` understands: an OSError, often with the status
of the answer."""
_T = TypeVar("_T")
_P = ParamSpec("_P")
_BEHIND_THE_END = 416
_ANOTHER_VERSION = 412
_SERVICES: Mapping[str, tuple[Callable[[str, Mapping[str, Any]], Service], str]] = {
    **dict.fromkeys(S3, (Amazon, "s3")),
    **dict.fromkeys(GOOGLE, (Google, "gcs")),
    **dict.fromkeys(AZURE, (Azure, "azure")),
    **dict.fromkeys(WEB, (Web, "http")),
}
"""What obstore reads and writes, with the extra that installs it; fsspec serves all else."""
_processes: set[int] = set()
"""The process that uses stores, and those that it was forked from, if they do. Threads and locks,
also of obstore, survive no fork."""


def _open_client(url: str, options: Mapping[str, Any], policy: RetryPolicy) -> _Client:
    """Return the client for the scheme of a URL; Unsupported if a package for it is missing."""
    scheme = url.partition("://")[0]
    if scheme not in _SERVICES:
        return FsspecClient(url, options)
    service, extra = _SERVICES[scheme]
    if find_spec("obstore") is None:
        raise missing(url, "obstore", extra)
    with require_accepted(url):
        provider = service(url, {**fsspec_settings(scheme), **options})
    if isinstance(provider, Web):
        return WebClient(provider, policy)
    return ObstoreClient(provider, policy)


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

    ``options`` are the client's own; it handles credentials, which appear in no message. A process
    that gets a store by pickle opens its own connections; one that is forked reads none.
    """

    policy = RetryPolicy()

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.scheme = url.partition("://")[0].lower()
        self.traffic = Traffic()
        self.remains: dict[str, int] = {}
        """Bytes of unfinished files, by URL, that could not be discarded."""
        self.blocks = BlockCache(_weakly(self.read))
        self._ranges = PlannedRanges(_weakly(self.read))
        self._url = url
        self._options = options
        self._sizes: dict[str, int] = {}
        self._index_folders: set[str] = set()
        """Folders whose metadata file was given: they may not be listable."""
        self._hidden: dict[str, str] = {}
        """Why the store does not say whether files are there, by key."""
        self._client: _Client | None = None

    def __reduce__(self) -> tuple[type[Store], tuple[str, Mapping[str, Any]]]:
        return Store, (self._url, dict(self._options))

    @property
    def client(self) -> _Client:
        """The client for the store's scheme, connected on first use.

        Raises Unsupported if a package for it is missing.
        """
        if self._client is None:
            self._client = _open_client(self._url, self._options, self.policy)
        return self._client

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of what was read, or is fetched ahead."""
        self.blocks.capacity = min(CAPACITY, nbytes // 4)
        self._ranges.capacity = nbytes - self.blocks.capacity

    @property
    def account(self) -> tuple[str, str]:
        """The kind of store, whatever name its scheme has, and the account that its URL names.

        One that no URL names is "": settings say which it is.
        """
        service = _SERVICES.get(self.scheme)
        host = self._url.partition("://")[2].partition("/")[0].partition("@")[2]
        kind = self.scheme if service is None else service[1]
        return kind, host.lower() if self.scheme in AZURE else ""

    @property
    def atomic_put(self) -> bool:
        """Whether an object appears only once it is complete."""
        return self.client.atomic_put

    def key(self, url: str) -> str:
        """Return the store's own name for the place of a URL."""
        return self.client.key(url)

    def changed(self, key: str, nbytes: int) -> None:
        """Drop what was read of a file: it was written, and has so many bytes."""
        self._sizes[key] = nbytes
        self.blocks.clear()
        self._ranges.clear()

    def listed_size(self, key: str) -> int:
        """Return the bytes of a file as it was last listed or written, 0 if it was not."""
        return self._sizes.get(key, 0)

    def url(self, key: str) -> str:
        """Return a place of the store as shown in messages."""
        return redact_url(self.client.url(key))

    def find(self, key: str, what: str, *, file_only: bool = False) -> dict[str, ObjectInfo]:
        """Return all files below a place by their relative paths; a file itself is ``""``.

        With ``file_only`` nothing below the place is asked for. Raises NotFound if there is none,
        or it cannot be listed; errors name it ``what``.
        """
        is_web = self.scheme in WEB
        infos = self._list_web(key) if is_web else self._list_files(key, what, file_only)
        if not infos:
            raise NotFound(f"{what}: no such file or folder")
        self._sizes |= {name: info.nbytes for name, info in infos.items()}
        folder, _, name = key.rpartition("/")
        if key in infos and name in INDEXES:
            self._index_folders.add(folder)
        files = {name.removeprefix(key).lstrip("/"): info for name, info in infos.items()}
        return dict(sorted(files.items()))

    def _list_files(self, key: str, what: str, file_only: bool) -> dict[str, ObjectInfo]:
        """Return a file if the name is a file's, or what a listing shows; a bucket lists no file.

        A file may have the name of a folder in a bucket. One request shows it.
        """
        in_bucket = self.scheme in _SERVICES and "/" in key
        is_named = in_bucket and is_file(key) and key.rpartition("/")[2] not in INDEXES
        if is_named or (file_only and in_bucket):
            try:
                if (infos := self._file_at(key)) or file_only:
                    return infos
            except Unaccepted:
                raise
            except Denied:  # S3's answer for a missing key if one may not list all of a bucket
                if self._is_listed(key):
                    raise
        infos = self._list(key, what)
        return infos if infos or is_named or not in_bucket else self._file_at(key)

    def _is_listed(self, key: str) -> bool:
        """Return whether the folder of a file that is denied shows it; False if that is, too."""
        client, policy = self.client, self.policy.of_listings()
        with suppress(Denied):
            if isinstance(client, ObstoreClient):
                return self.ask(self.url(key), lambda: client.is_listed(key), policy)
        return False

    def _file_at(self, key: str) -> dict[str, ObjectInfo]:
        """Return the file of this key, if there is one."""
        info = self._info(key)
        return {} if info is None else {key: info}

    def _info(self, key: str) -> ObjectInfo | None:
        """Return the store's information on a file; None if it is missing."""
        self.traffic.count()
        policy = self.policy.of_listings()
        with suppress(NotFound):
            return self.ask(self.url(key), lambda: self.client.info(key), policy)
        return None

    def _list(self, key: str, what: str) -> dict[str, ObjectInfo]:
        self.traffic.count()
        try:
            return self.ask(what, lambda: self.client.find(key), self.policy.of_listings())
        except Unaccepted:
            raise
        except Denied as error:
            return self._look_up(key, what, error)

    def _look_up(self, key: str, what: str, error: Denied) -> dict[str, ObjectInfo]:
        """Return what can be known if listing is denied: a metadata file, and files that it names.

        A store that denies listing does not reveal either that a file is missing.
        """
        if key in self._index_folders:
            return self._list_named(key, "")
        if key.rpartition("/")[2] not in INDEXES:
            hint = f"give its metadata file, which needs no listing: {what}/{INDEXES[0]}"
            hint = f"{error.hint}; or {hint}" if error.hint else hint
            raise Denied(f"{error}", hint) from None
        info = self._info_if_shown(key)
        if info is None:
            raise error
        return {key: info}

    def _info_if_shown(self, key: str) -> ObjectInfo | None:
        """Return the store's information on a file; None if it is missing, or not shown."""
        try:
            return self._info(key)
        except Unaccepted:
            raise
        except Denied as error:
            self._hidden[key] = str(error)
        return None

    def hidden_below(self, key: str) -> dict[str, str]:
        """Return why files below a place are not shown, by their relative paths.

        Where listing is denied, a store does not say either that a file is missing.
        """
        return within_folder(self._hidden, key)

    def _list_named(self, folder: str, query: str) -> dict[str, ObjectInfo]:
        """Return the files of a folder that cannot be listed, as far as they can be known."""
        look = self._info if self.scheme in WEB else self._info_if_shown

        def key_of(name: str) -> str:
            return f"{folder}/{name}{query}"

        def info_of(name: str) -> ObjectInfo | None:
            return look(key_of(name))

        infos = files_below(info_of, lambda name: self.get(key_of(name), key_of(name)))
        return {f"{folder}/{name}": info for name, info in infos.items()}

    def _list_web(self, key: str) -> dict[str, ObjectInfo]:
        """Return a file, or the files of a folder as far as they can be known."""
        head, mark, query = key.partition("?")
        if is_file(key):
            return self._file_at(key)
        return self._list_named(head.rstrip("/"), mark + query)

    def expect(self, runs: Iterable[VersionSpan]) -> None:
        """Fetch the next small reads ahead, unless they are planned."""
        _require_own_process()
        self.blocks.expect(run for run in runs if not self._ranges.has_planned(*run))

    def plan(self, runs: Iterable[VersionSpan]) -> Callable[[], None]:
        """Fetch the next reads ahead, in order; return a function that ends this."""
        _require_own_process()
        return self._ranges.plan(runs)

    def read_into(self, file: ObjectVersion, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from ``offset`` of a file; return the bytes there are.

        Raises Changed if the store knows that it is no longer the file that was listed.
        """
        _require_own_process()
        done = self._ranges.read_into(file, offset, buffer)
        return self.blocks.read_into(file, offset, buffer) if done is None else done

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes of a file from ``start`` to ``end``, fewer if it ends before.

        Raises Changed if the store knows that it is no longer the file that was listed.
        """
        # a block may reach beyond the end: the answer would be short, and the size be asked for
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
        if len(data) < end - start:  # the file may have become shorter than it was listed
            info = self.client.info(key)
            if info is not None and info.nbytes > start + len(data):
                raise OSError(f"only {len(data):,} bytes received")
        return data

    def reads_version(self, version: str) -> bool:
        """Return whether a read that names this version fails if another is there."""
        return self.client.pins and version.startswith('"')

    def put(self, key: str, data: bytes | bytearray, what: str) -> None:
        """Write a small file."""
        self.ask(what, lambda: self.client.put(key, data))

    def upload(self, key: str, pieces: Pieces, upload: Upload) -> None:
        """Write a file from its pieces; what the store refuses to discard is in ``remains``."""
        url = self.url(key)

        def send() -> None:
            try:
                self.client.upload(key, pieces, upload)
            except PartsRemain:
                self.remains[url] = pieces.sent
                raise

        # once: pieces can be taken but once, and obstore repeats each by itself
        self.ask(url, send, replace(self.policy, attempts=1))

    def get(self, key: str, what: str) -> bytes:
        """Return all of a small file; NotFound if there is none."""
        data = bytes(self.ask(what, lambda: self.client.get(key)))
        self.traffic.count(len(data))
        return data

    def remove(self, keys: Iterable[str], what: str) -> None:
        """Remove those files that exist, one after the other."""
        for key in keys:
            with suppress(NotFound):
                self.ask(what, partial(self.client.remove, key))

    def ask(self, what: str, work: Callable[[], _T], policy: RetryPolicy | None = None) -> _T:
        """Return the answer to a request; NotFound or NoAnswer if there is none."""
        _require_own_process()
        return retry(policy or self.policy, what, work)


def _weakly(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a method with a weak reference to its store: no cycle keeps its connections."""
    reference = WeakMethod(method)

    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        bound = reference()
        if bound is None:
            raise ReferenceError("the store is no longer open")
        return bound(*arguments, **keywords)

    return call


def _require_own_process() -> None:
    """Raise Unsupported in a process that was forked from one that used a store."""
    _processes.add(os.getpid())
    if len(_processes) > 1:
        raise Unsupported(
            "a process that was forked cannot read a store that its parent has read",
            hint='start it by multiprocessing.get_context("forkserver") or "spawn"; a DataLoader'
            ' takes multiprocessing_context="forkserver"',
        )
