"""A store that fsspec knows: list, read and write it, with retries.

The web lists nothing: the files of a checkpoint there are those that its metadata names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from ckptool.errors import Changed, NotFound, Unsupported, UsageError
from ckptool.storage.block_cache import BlockCache, ObjectVersion
from ckptool.storage.ranged_read import read_s3_range, read_web_range
from ckptool.storage.retry import (
    Denied,
    NoAnswer,
    RetryPolicy,
    Unaccepted,
    error_text,
    retry,
    status_of,
    unreachable,
)
from ckptool.storage.unlisted import INDEXES, infos, is_file, names_below
from ckptool.storage.url import redact_url

_T = TypeVar("_T")
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
    "hf": "hf",
    "http": "http",
    "https": "http",
}
_CONNECTIONS = 64
_BEHIND_THE_END = 416
_ANOTHER_VERSION = 412
_ATOMIC_PUT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"}


class ObjectInfo(NamedTuple):
    """A file of a store: its size in bytes, and what changes when it does (an ETag or a time)."""

    nbytes: int
    version: str
    modified: float


@dataclass(slots=True)
class Traffic:
    """What was asked of a store: requests, and the bytes that came."""

    requests: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, received: int = 0) -> None:
        """Count one more request, which brought so many bytes."""
        with self._lock:
            self.requests += 1
            self.received += received


class Store:
    """A file system of fsspec. ``traffic`` counts what is asked of it.

    Credentials are fsspec's own business and appear in no message.
    """

    policy = RetryPolicy()

    def __init__(self, fs: Any, scheme: str) -> None:
        self.fs = fs
        self.scheme = scheme
        self.traffic = Traffic()
        self.remains: dict[str, int] = {}
        """Bytes of files that were not finished, by their URLs, that could not be thrown away."""
        self.blocks = BlockCache(self._fetch)
        self._sizes: dict[str, int] = {}
        self._named: set[str] = set()
        """Folders that may not be listed, and whose metadata file was named."""

    @classmethod
    def connect(cls, url: str) -> Store:
        """Connect to the store of a URL; Unsupported where a package for it is missing."""
        scheme = url.partition("://")[0].lower()
        try:
            from fsspec.core import url_to_fs

            store = cls(url_to_fs(url, **_wide(scheme))[0], scheme)
            if _EXTRAS.get(scheme) == "s3":
                store.fs.retries = 1  # ``ask`` tries again, and knows when it is enough
            return store
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            hint = f"pip install 'ckptool[{extra}]'" if extra else str(error)
            message = f"{redact_url(url)}: a package that reads {scheme}:// is missing"
            raise Unsupported(message, hint=hint) from None
        except ValueError as error:
            if "not known" not in str(error).lower():
                raise UsageError(f"{redact_url(url)}: {error_text(error)}") from None
            hint = "s3://, gs://, az://, hf://, https://, or another that fsspec knows"
            raise UsageError(
                f"{redact_url(url)}: no store is called {scheme}://", hint=hint
            ) from None
        except Exception as error:  # noqa: BLE001 (each client of a store has errors of its own)
            raise unreachable(redact_url(url), error) from None

    @property
    def atomic_put(self) -> bool:
        """Whether an object appears only once it is whole."""
        return self.scheme in _ATOMIC_PUT

    def key(self, url: str) -> str:
        """Return what the file system calls the place that a URL names."""
        return str(self.fs._strip_protocol(url))

    def changed(self, key: str, nbytes: int) -> None:
        """Forget what was read of a file: it was written, and has so many bytes."""
        self._sizes[key] = nbytes
        self.blocks.clear()
        self.fs.invalidate_cache()

    def url(self, key: str) -> str:
        """Return a place of the store as messages show it."""
        return redact_url(self.fs.unstrip_protocol(key))

    def find(self, key: str, what: str) -> dict[str, ObjectInfo]:
        """Return all files below a place by their relative paths; a file itself is ``""``.

        Raises NotFound where there is none, or it cannot be listed; errors call it ``what``.
        """
        self.fs.invalidate_cache()
        infos = self._list_web(key) if self.scheme in SCHEMES else self._list(key, what)
        files = {}
        for name, info in infos.items():
            relative = "" if name == key else name.removeprefix(key).lstrip("/")
            if info.get("type", "file") == "file" and not name.endswith("/"):
                files[relative] = _info(info)
                self._sizes[name] = files[relative].nbytes
        if not files:
            raise NotFound(f"{what}: no such file or folder")
        return dict(sorted(files.items()))

    def _list(self, key: str, what: str) -> dict[str, Any]:
        self.traffic.count()
        policy = self.policy.of_listings()
        try:
            infos = retry(policy, what, lambda: self.fs.find(key, detail=True))
        except Unaccepted:
            raise
        except Denied as error:
            return self._look_up(key, what, error)
        if isinstance(infos, dict):
            return infos
        # adlfs (2024.7 to 2026.8) has no details of a file that is asked for by its name.
        return {name: self.ask(what, partial(self.fs.info, name)) for name in infos}

    def _look_up(self, key: str, what: str, error: Denied) -> dict[str, Any]:
        """Return what can be known where listing is denied: of a metadata file, and by that.

        A store that may not be listed does not say either that a file is not there.
        """
        folder, _, name = key.rpartition("/")
        if key in self._named:
            return self._list_named(key, "")
        if name not in INDEXES:
            hint = f"name its metadata file, for which nothing is listed: {what}/{INDEXES[0]}"
            raise Denied(f"{error}", hint) from None
        info = self._head(key)
        if info is None:
            raise error
        self._named.add(folder)
        return {key: info}

    def _head(self, key: str) -> dict[str, Any] | None:
        """Return what the store says of a file; None where it is not there, or is not shown."""
        self.traffic.count()
        try:
            return dict(self.ask(self.url(key), lambda: self.fs.info(key)))
        except Unaccepted:
            raise
        except (NotFound, Denied):
            return None

    def _list_named(self, folder: str, query: str) -> dict[str, Any]:
        """Return the files of a folder that cannot be listed, as far as they can be known."""
        look = self._web_info if self.scheme in SCHEMES else self._head

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
        """Return what the server says of a file, its size at least; None where there is none."""
        self.traffic.count()
        try:
            info: dict[str, Any] = self.ask(redact_url(key), lambda: self._timed("_info", key))
        except NotFound:
            return None
        if info["size"] is None:
            raise Unsupported(f"{redact_url(key)}: the server does not say how large it is")
        return info

    def _fetch(self, file: ObjectVersion, start: int, end: int) -> bytes:
        """Return the bytes of a file from ``start`` to ``end``, fewer where it ends before.

        Raises Changed where the store knows that it is no longer the file that was listed.
        """
        end = min(end, self._sizes.get(file.key, end))
        if start >= end:
            return b""
        what = f"{self.url(file.key)}: bytes {start:,} to {end:,}"
        return self.ask(what, lambda: self._range(file, start, end))

    def _range(self, file: ObjectVersion, start: int, end: int) -> bytes:
        """Send one ranged request; OSError where fewer bytes came than there are, or more."""
        key = file.key
        try:
            data = self._part(file, start, end)
        except Exception as error:
            if status_of(error) == _ANOTHER_VERSION:
                raise Changed(f"{self.url(key)}: it was replaced while it was read") from None
            if status_of(error) != _BEHIND_THE_END:
                raise
            data = b""
        self.traffic.count(len(data))
        if len(data) > end - start:
            raise OSError(f"{len(data):,} bytes came, {end - start:,} were asked for")
        if len(data) < end - start and self._size_now(key) > start + len(data):
            raise OSError(f"only {len(data):,} bytes came")
        return data

    def _size_now(self, key: str) -> int:
        """Return the size of a file as the store says it now, not as it was listed."""
        self.fs.invalidate_cache()
        return int(self._timed("_info", key)["size"] or 0)

    def reads_version(self, version: str) -> bool:
        """Return whether a read that names this version fails where another is there."""
        return hasattr(self.fs, "_call_s3") and version.startswith('"')

    def _part(self, file: ObjectVersion, start: int, end: int) -> bytes:
        if hasattr(self.fs, "_call_s3"):
            pinned = self.reads_version(file.version)
            data = self._synced(read_s3_range(self.fs, file, start, end, pinned=pinned))
        elif self.scheme in SCHEMES:
            data = self._synced(read_web_range(self.fs, file, start, end))
        else:
            plain = {"cache_type": "none", "size": self._sizes.get(file.key)}
            known = plain if self._is_plain else {}
            data = self._timed("_cat_file", file.key, start=start, end=end, **known)
        return bytes(data)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether parts are read in fsspec's own way, which also reads some MiB behind them."""
        from fsspec import AbstractFileSystem

        own = type(self.fs).cat_file is not AbstractFileSystem.cat_file
        return not (own or self.fs.async_impl)

    def _timed(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system; give up after a time where it can be given up."""
        if not self.fs.async_impl:
            return getattr(self.fs, method.removeprefix("_"))(*arguments, **named)
        return self._synced(getattr(self.fs, method)(*arguments, **named))

    def _synced(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a coroutine of the file system; give up after a time."""
        from fsspec.asyn import sync

        return sync(self.fs.loop, lambda: work, timeout=self.policy.timeout)

    def make_folder(self, key: str, what: str) -> None:
        """Make a folder where the store has folders."""
        self.ask(what, lambda: self.fs.makedirs(key, exist_ok=True))

    def put(self, key: str, data: bytes, what: str) -> None:
        """Write a small file."""
        self.ask(what, lambda: self.fs.pipe_file(key, data))

    def get(self, key: str, what: str) -> bytes:
        """Return all of a small file; NotFound where there is none."""
        data: bytes = self.ask(what, lambda: self.fs.cat_file(key))
        self.traffic.count(len(data))
        return data

    def remove(self, keys: Iterable[str], what: str) -> None:
        """Remove files, those that are there, one after the other."""
        for key in keys:
            with suppress(NotFound):
                self.ask(what, partial(self.fs.rm_file, key))

    def abort_uploads(self, head: str, chosen: Callable[[str], bool]) -> None:
        """Throw away the parts of unfinished files whose keys begin with ``head`` and are chosen.

        None are where they cannot be listed, as in all stores but S3, and by who may not; what is
        found and cannot be thrown away is among what ``remains``.
        """
        if not hasattr(self.fs, "call_s3"):
            return
        bucket, _, prefix = head.partition("/")
        uploads: list[dict[str, Any]] = []
        with suppress(NotFound, NoAnswer):
            uploads = self.ask(
                head,
                lambda: self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix),
            ).get("Uploads", [])
        for upload in uploads:
            key = f"{bucket}/{upload['Key']}"
            if chosen(key):
                self.abort_upload(key, upload["UploadId"])

    def abort_upload(self, key: str, number: str, nbytes: int = 0) -> None:
        """Throw away the parts, of so many bytes, of an unfinished file of S3, or say they stay."""
        bucket, _, name = key.partition("/")
        url = self.url(key)
        try:
            self.ask(url, lambda: self.fs.abort_mpu(bucket, name, number))
        except NotFound:
            return
        except NoAnswer:
            self.remains[url] = self.remains.get(url, 0) + nbytes

    def ask(self, what: str, work: Callable[[], _T]) -> _T:
        """Return the answer to a request; NotFound or NoAnswer where there is none."""
        return retry(self.policy, what, work)


def _wide(scheme: str) -> dict[str, Any]:
    """Return settings for many requests of a store at once: botocore allows 10."""
    if _EXTRAS.get(scheme) != "s3":
        return {}
    from fsspec.config import conf

    theirs = conf.get("s3", {}).get("config_kwargs", {})
    once = {"retries": {"max_attempts": 0}}  # ``Store.ask`` tries again
    return {"config_kwargs": {"max_pool_connections": _CONNECTIONS} | once | theirs}


def _info(info: dict[str, Any]) -> ObjectInfo:
    versions = map(info.get, ("ETag", "etag", "md5Hash", "sha256", "blob_id", "Last-Modified"))
    version = next(filter(None, versions), None)
    modified = info.get("LastModified") or info.get("last_modified") or info.get("mtime")
    modified = modified or info.get("updated") or info.get("created") or 0
    seconds = modified.timestamp() if hasattr(modified, "timestamp") else modified
    seconds = seconds if isinstance(seconds, int | float) else 0
    return ObjectInfo(int(info.get("size") or 0), str(version or modified), float(seconds))


SCHEMES = ("http", "https")
