"""S3, Google Cloud Storage, Azure and the web with obstore, a client in Rust."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from msgspec.structs import replace

from ckptool.errors import Changed, Unsupported
from ckptool.storage.clients.answers import Answer, answer_of
from ckptool.storage.clients.client import ObjectInfo, ObjectVersion, Pieces, Upload
from ckptool.storage.clients.retry import GONE, RetryPolicy
from ckptool.storage.clients.schemes import redact_url, require_accepted
from ckptool.storage.clients.service import UPLOAD, Service, Settings

_T = TypeVar("_T")
_Meta = Mapping[str, Any]
"""What obstore says of a file."""
_BLOCKS_GONE = "InvalidBlockList"
"""The code of Azure's answer to a list of blocks that it does not have (any more)."""
_CLOCKS_DIFFER = timedelta(minutes=15)
"""How far apart a store's clock and this machine's may be: S3 accepts no request beyond that."""
_PAGE = 1000
"""Entries of a listing that are taken at a time, as S3 sends them."""
_MOVES = 3
"""How often a place may have moved while one request is made."""


class ObstoreClient:
    """A client on obstore; ``service`` says where things are."""

    atomic_put = True

    def __init__(self, service: Service, policy: RetryPolicy) -> None:
        self.pins = service.pins
        self.key, self.url = service.key, service.url
        self._service = service
        once = replace(policy, attempts=1)  # ``Store.ask`` tries again
        self._reads = Settings(once, policy.timeout)
        self._puts = Settings(once, UPLOAD)
        self._uploads = Settings(policy, UPLOAD)  # nobody else can send a part again
        self._stores: dict[tuple[str, Settings], Any] = {}

    def find(self, key: str) -> dict[str, ObjectInfo]:
        """Return all files below a place by their keys."""
        place, _ = self._service.split(key)
        listed = self._ask(key, _list)
        return {f"{place}/{path}": info_of(meta) for path, meta in listed.items()}

    def info(self, key: str) -> ObjectInfo | None:
        """Return the store's current information on a file."""
        return info_of(self._ask(key, _head))

    def is_listed(self, key: str) -> bool:
        """Return whether a listing shows a file, whatever the store says of the file itself."""
        return self._ask(key, _is_listed)

    def get(self, key: str) -> memoryview:
        """Return all of a small file."""
        return self._ask(key, lambda obstore, store, name: _bytes(obstore.get(store, name)))

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before.

        obstore (0.12) checks the status and Content-Range, but not how many bytes come.
        """
        pinned = self.pins and file.version.startswith('"')
        options: Any = {"range": (start, end)} | ({"if_match": file.version} if pinned else {})

        def read(obstore: Any, store: Any, name: str) -> tuple[memoryview, Mapping[str, Any]]:
            answer = obstore.get(store, name, options=options)
            return _bytes(answer), answer.meta

        data, meta = self._ask(file.key, read)
        if pinned and meta["e_tag"] != file.version:
            raise Changed(f"{redact_url(self.url(file.key))}: it was replaced while it was read")
        if len(data) != min(end, meta["size"]) - start:
            raise OSError(f"{len(data):,} bytes received, {end - start:,} requested")
        return data

    def put(self, key: str, data: bytes | bytearray) -> None:
        """Make or replace a small file."""

        def put(obstore: Any, store: Any, name: str) -> None:
            obstore.put(store, name, data, use_multipart=False)

        self._ask(key, put, self._puts)

    def upload(self, key: str, pieces: Pieces, upload: Upload) -> None:
        """Make or replace a file from its pieces in order; obstore repeats each, and discards them.

        If the last answer was lost and the upload is gone, the file may be there: S3 does not know
        the upload any more, Azure none of its blocks.
        """
        began = datetime.now(UTC)

        def put(obstore: Any, store: Any, name: str) -> None:
            limits = {"chunk_size": upload.part, "max_concurrency": upload.at_once}
            obstore.put(store, name, pieces, use_multipart=True, **limits)

        try:
            self._ask(key, put, self._uploads)
        except FileNotFoundError:
            has_parts = partial(_has_parts, upload)
            if pieces.sent < upload.nbytes or not self._is_there(key, upload, has_parts):
                raise
        except Answer as error:
            is_new = partial(_is_made_since, began)
            is_last = error.code == _BLOCKS_GONE and pieces.sent == upload.nbytes
            if not is_last or not self._is_there(key, upload, is_new):
                raise

    def _is_there(self, key: str, upload: Upload, is_it: Callable[[_Meta], bool]) -> bool:
        """Return whether a file has the size of an upload, and whether ``is_it`` says so, too."""
        with suppress(OSError):
            meta = self._ask(key, _head)
            return meta["size"] == upload.nbytes and is_it(meta)
        return False

    def remove(self, key: str) -> None:
        """Remove a file."""
        self._ask(key, lambda obstore, store, name: obstore.delete(store, name))

    def _ask(
        self, key: str, work: Callable[[Any, Any, str], _T], settings: Settings | None = None
    ) -> _T:
        """Return the answer to a request; FileNotFoundError, or the error of ``answer_of``."""
        import obstore

        moves = 0
        while True:
            place, name, store = self._open(key, settings or self._reads)
            try:
                return work(obstore, store, name)
            except Exception as raised:  # noqa: BLE001 (obstore's errors say little by their class)
                error = answer_of(raised, redact_url(self.url(key)))
                if not isinstance(error, Answer):
                    raise error from None
                if moves < _MOVES and self._service.has_moved(place, error, store):
                    self._stores.clear()
                    moves += 1
                    continue
                if error.status in GONE:
                    raise FileNotFoundError(str(error)) from error
                raise error from None

    def _open(self, key: str, settings: Settings) -> tuple[str, str, Any]:
        """Return the place of a key, the name in it, and obstore's store for the place."""
        with require_accepted(self.url(key)):
            place, name = self._service.split(key)
            store = self._stores.get((place, settings))  # others may clear them meanwhile
            if store is None:
                store = self._stores[place, settings] = self._service.open(place, settings)
        return place, name, store


def _list(obstore: Any, store: Any, key: str) -> dict[str, Mapping[str, Any]]:
    """Return all files below a key by their keys.

    obstore (0.12) shows the mark of a folder, whose key ends with a slash, without it: what is
    empty, has the name of a folder or is there twice is asked for by its name.
    """
    entries: list[Mapping[str, Any]] = []
    files: dict[str, Mapping[str, Any]] = {}
    for page in obstore.list(store, key or None, chunk_size=_PAGE):
        if len(page) == _PAGE and files.keys() >= {entry["path"] for entry in page}:
            raise Unsupported(f"{key}: the store lists the same files again and again")
        entries += (entry for entry in page if entry["path"] != key)
        files |= {entry["path"]: entry for entry in page if entry["path"] != key}
    folders = {path[:at] for path in files for at, letter in enumerate(path) if letter == "/"}
    paths: set[str] = set()
    for entry in entries:
        path = entry["path"]
        if path in paths or path in folders or not entry["size"]:
            try:
                files[path] = obstore.head(store, path)
            except FileNotFoundError:
                files.pop(path, None)
        paths.add(path)
    return files


def _is_listed(obstore: Any, store: Any, key: str) -> bool:
    folder = key.rpartition("/")[0]
    pages = obstore.list(store, folder or None, offset=key[:-1], chunk_size=_PAGE)
    paths = (entry["path"] for page in pages for entry in page)  # in order, in these stores
    return key in takewhile(lambda path: path <= key, paths)


def _has_parts(upload: Upload, meta: _Meta) -> bool:
    """Return whether a file has as many parts as an upload: S3's ETag ends with the count."""
    count = -(-upload.nbytes // upload.part)
    return f"{meta['e_tag']}".endswith(f'-{count}"')


def _is_made_since(began: datetime, meta: _Meta) -> bool:
    """Return whether a file may have been made after a time."""
    modified: datetime = meta["last_modified"]
    return modified >= began - _CLOCKS_DIFFER


def _head(obstore: Any, store: Any, name: str) -> Mapping[str, Any]:
    meta: Mapping[str, Any] = obstore.head(store, name)
    return meta


def _bytes(answer: Any) -> memoryview:
    return memoryview(answer.bytes())


def info_of(meta: Mapping[str, Any]) -> ObjectInfo:
    """Return what obstore says of a file; Azure lists ETags without the quotes that it sends."""
    modified, etag = meta["last_modified"], meta["e_tag"]
    if etag and not etag.startswith(('"', "W/")):
        etag = f'"{etag}"'
    return ObjectInfo(meta["size"], str(etag or modified), modified.timestamp())
