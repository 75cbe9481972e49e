"""Lists and reads S3 with obstore alone, without s3fs, which takes long to import.

Used if credentials and endpoint are recorded. The first answer of a bucket decides: if anything
fails before that, s3fs takes over for good and finds the reason (a region, a redirect).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients.aws import Signer, find_signer
from ckptool.storage.clients.checked_ranges import is_pinned
from ckptool.storage.clients.obstore_s3 import (
    has_proxies,
    is_available,
    is_forked,
    open_s3,
    raise_answer,
    read_range,
)
from ckptool.storage.clients.turns import Turns
from ckptool.storage.url import S3

_T = TypeVar("_T")
_CONNECT, _READ = 5.0, 15.0
"""Seconds to wait for a connection and between bytes: those of s3fs (2026.9)."""


class StoreClient(Protocol):
    """Lists and reads files of a store; each method raises the errors of the store's client."""

    def find(self, key: str) -> Mapping[str, dict[str, Any]] | list[str]:
        """Return all files below a place, or the file there, by their keys."""

    def info(self, key: str) -> dict[str, Any]:
        """Return the store's information on a file, or that there is a folder."""

    def get(self, key: str) -> bytes | memoryview:
        """Return all of a small file."""

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before."""


class _Bucket(Struct):
    """A bucket as obstore addresses it; None once it is left to s3fs."""

    store: Any
    has_answered: bool = False


class DirectClient:
    """Asks obstore; ``others``, s3fs, which is then imported, answers what obstore cannot."""

    def __init__(self, signer: Signer, others: Callable[[], StoreClient], timeout: float) -> None:
        self._signer = signer
        self._others = others
        self._timeout = timeout
        self._buckets: dict[str, _Bucket] = {}
        self._turns = Turns()

    def find(self, key: str) -> Mapping[str, dict[str, Any]] | list[str]:
        """Return all files below a place, or the file there, by their keys."""
        found = self._ask(key, _list)
        return self._others().find(key) if found is None else found

    def info(self, key: str) -> dict[str, Any]:
        """Return S3's information on a file or folder; FileNotFoundError if there is neither."""
        found = self._ask(key, _look_up)
        if found is None:
            return self._others().info(key)
        if not found:
            raise FileNotFoundError(key)
        return found

    def get(self, key: str) -> bytes | memoryview:
        """Return all of a small file."""
        data = self._ask(key, _get)
        return self._others().get(key) if data is None else data

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before."""
        version = file.version if is_pinned(S3[0], file.version) else None

        def read(store: Any, bucket: str, key: str) -> memoryview | None:
            return read_range(store, key, version, start, end)

        data = self._ask(file.key, read)
        return self._others().read(file, start, end) if data is None else data

    def _ask(self, place: str, work: Callable[[Any, str, str], _T | None]) -> _T | None:
        """Return obstore's answer about a place; None if it gives none.

        Raises refusals, and Busy, after which the others are asked about the place once.
        """
        name, _, key = place.partition("/")
        if is_forked() or key != key.strip("/") or self._turns.are_others(place):
            return None
        bucket = self._open(name)
        if bucket.store is None:
            return None
        try:
            found = work(bucket.store, name, key)
        except Exception as error:  # noqa: BLE001 (whatever else it is, s3fs is asked and says so)
            if isinstance(error, FileNotFoundError) and (
                bucket.has_answered or _can_list(bucket.store, key)
            ):
                bucket.has_answered = True
                raise FileNotFoundError(place) from None
            if bucket.has_answered:
                raise_answer(self._turns, place, error)
            found = None
        if found is None and not bucket.has_answered:
            bucket.store = None
        bucket.has_answered |= found is not None
        return found

    def _open(self, name: str) -> _Bucket:
        if name not in self._buckets:
            settings = self._signer.settings(name)
            timeouts = {"connect_timeout": _CONNECT, "read_timeout": _READ}
            seconds = timeouts | {"timeout": self._timeout}
            store = None
            if settings is not None:
                options = {word: timedelta(seconds=time) for word, time in seconds.items()}
                store = open_s3(name, settings, options, self._signer.credentials)
            self._buckets.setdefault(name, _Bucket(store))
        return self._buckets[name]


def by_obstore_alone(
    scheme: str,
    options: Mapping[str, Any],
    others: Callable[[], StoreClient],
    timeout: float,
) -> DirectClient | None:
    """Return a client on obstore, if credentials and endpoint are recorded; None if not."""
    if scheme not in S3 or options or has_proxies() or not is_available():
        return None
    signer = find_signer(os.environ)
    return None if signer is None else DirectClient(signer, others, timeout)


def _list(store: Any, bucket: str, key: str) -> dict[str, dict[str, Any]] | None:
    """Return all files below a key, or the one there; None if s3fs has to determine that.

    obstore (0.12) shows the marker of a folder, which is empty and ends with a slash, without it.
    """
    import obstore

    listed = obstore.list(store, key or None, chunk_size=1000)
    found = [one for one in listed.collect() if one["path"] != key]
    files = {one["path"]: one for one in found}
    folders = {path[:at] for path in files for at in _slashes(path)}
    if len(files) < len(found) or not folders.isdisjoint(files):
        return None
    if not all(one["size"] for one in found):
        return None
    if not found and key:
        return _head(store, bucket, key)
    return {f"{bucket}/{path}": _described(bucket, one) for path, one in files.items()}


def _can_list(store: Any, key: str) -> bool:
    """Return whether a bucket is there under this name, so that a key can be missing in it."""
    import obstore

    try:
        next(iter(obstore.list(store, key, chunk_size=1)), [])
    except Exception:  # noqa: BLE001 (whatever it is, s3fs is asked and says so)
        return False
    return True


def _slashes(path: str) -> list[int]:
    return [at for at, letter in enumerate(path) if letter == "/"]


def _head(store: Any, bucket: str, key: str) -> dict[str, dict[str, Any]]:
    import obstore

    try:
        return {f"{bucket}/{key}": _described(bucket, obstore.head(store, key))}
    except FileNotFoundError:
        return {}


def _look_up(store: Any, bucket: str, key: str) -> dict[str, Any] | None:
    """Return the information on a file, or that it is a folder; empty if there is neither.

    A missing key is not an answer by itself before any other answer: the bucket may have another
    name at this endpoint.
    """
    found = _head(store, bucket, key)
    if not found:
        import obstore

        name, first = f"{bucket}/{key}", next(iter(obstore.list(store, key, chunk_size=1)), [])
        return {"name": name, "size": 0, "type": "directory"} if first else {}
    return found[f"{bucket}/{key}"]


def _get(store: Any, bucket: str, key: str) -> memoryview:
    import obstore

    return memoryview(obstore.get(store, key).bytes())


def _described(bucket: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return obstore's information on an object in the form of s3fs."""
    return {
        "name": f"{bucket}/{meta['path']}",
        "size": meta["size"],
        "type": "file",
        "ETag": meta["e_tag"],
        "LastModified": meta["last_modified"],
    }
