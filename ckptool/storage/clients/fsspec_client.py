"""Any other store, with its file system of fsspec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptool.errors import Unsupported, UsageError, error_text
from ckptool.storage.clients.client import (
    ObjectInfo,
    ObjectVersion,
    Pieces,
    Upload,
    hidden_name,
)
from ckptool.storage.clients.retry import unreachable
from ckptool.storage.clients.schemes import redact_url, unaccepted

_VERSIONS = ("ETag", "etag", "sha256", "blob_id")
"""The clients' keys for a value that differs between versions of a file."""


def open_file_system(url: str, options: Mapping[str, Any]) -> Any:
    """Return the file system of a URL; Unsupported if a package for it is missing."""
    scheme = url.partition("://")[0].lower()
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url, **options)[0]
    except ImportError as error:
        raise missing(url, str(error)) from None
    except TypeError as error:
        raise unaccepted(url, error_text(error)) from None
    except ValueError as error:
        if "not known" not in str(error).lower():
            raise UsageError(f"{redact_url(url)}: {error_text(error)}") from None
        hint = "s3://, gs://, az://, hf://, https://, or another that fsspec knows"
        raise UsageError(f"{redact_url(url)}: unknown store {scheme}://", hint=hint) from None
    except Exception as error:  # noqa: BLE001 (each client of a store has errors of its own)
        raise unreachable(redact_url(url), error) from None


def missing(url: str, reason: str, extra: str | None = None) -> Unsupported:
    """Return the error for a package that is not installed, and what installs it."""
    scheme = url.partition("://")[0]
    extra = extra or ("hf" if scheme == "hf" else None)
    hint = f"pip install 'ckptool[{extra}]'" if extra else reason
    message = f"{redact_url(url)}: a package that reads {scheme}:// is missing"
    return Unsupported(message, hint=hint)


class FsspecClient:
    """A client on a file system of fsspec, which sets its own time limits."""

    pins = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.atomic_put = url.startswith("hf://")
        self.fs = open_file_system(url, options)

    def key(self, url: str) -> str:
        """Return the file system's name for the place of a URL."""
        return str(self.fs._strip_protocol(url))

    def url(self, key: str) -> str:
        """Return the URL of a key."""
        return str(self.fs.unstrip_protocol(key))

    def find(self, key: str) -> dict[str, ObjectInfo]:
        """Return all files below a place, or the file there, by their keys."""
        self.fs.invalidate_cache()  # else it may answer with what it listed before
        infos: Mapping[str, dict[str, Any]] = self.fs.find(key, detail=True)
        return {
            name: _info(info)
            for name, info in infos.items()
            if info.get("type", "file") == "file" and not name.endswith("/")
        }

    def info(self, key: str) -> ObjectInfo | None:
        """Return the store's current information on a file; None if a folder is there."""
        self.fs.invalidate_cache()
        fields = self.fs.info(key)
        return _info(fields) if fields.get("type", "file") == "file" else None

    def get(self, key: str) -> memoryview:
        """Return all of a small file."""
        return memoryview(self.fs.cat_file(key))

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before.

        By default fsspec would also read some MiB after them.
        """
        limits = {"start": start, "end": end} | ({"cache_type": "none"} if self._is_plain else {})
        return memoryview(self.fs.cat_file(file.key, **limits))

    def put(self, key: str, data: bytes | bytearray) -> None:
        """Make or replace a small file; of one that fails, nothing is left."""
        self._make_folder(key)
        self._write(self.fs.open(key, "wb"), iter([data]))

    def upload(self, key: str, pieces: Pieces, upload: Upload) -> None:
        """Make or replace a file with fsspec's own stream, which alone could repeat a request.

        It has a hidden name until it is complete, where it would show before.
        """
        name = key if self.atomic_put else hidden_name(key)
        self._make_folder(key)
        try:
            self._write(self.fs.open(name, "wb", block_size=upload.part), pieces)
            if name != key:
                self.fs.mv(name, key)
        except BaseException:
            if name != key:
                with suppress(Exception):
                    self.fs.rm_file(name)
            raise

    def _make_folder(self, key: str) -> None:
        """Make the folder of a file, if the store has folders."""
        if not self.atomic_put:
            self.fs.makedirs(self.fs._parent(key), exist_ok=True)

    def _write(self, stream: Any, pieces: Iterator[bytes | bytearray]) -> None:
        """Write a file's pieces, and close it."""
        try:
            for piece in pieces:
                stream.write(piece)
            stream.close()
        except BaseException:
            _discard(stream)
            raise

    def remove(self, key: str) -> None:
        """Remove a file."""
        self.fs.rm_file(key)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether parts are read in fsspec's own way."""
        from fsspec import AbstractFileSystem

        is_overridden = type(self.fs).cat_file is not AbstractFileSystem.cat_file
        return not (is_overridden or self.fs.async_impl)


def _discard(stream: Any) -> None:
    """Leave nothing of an unfinished file."""
    with suppress(Exception):
        stream.discard()
    with suppress(Exception):  # else its destructor sends what it holds
        stream.closed = True
    with suppress(Exception):  # huggingface_hub (2.4) keeps unsent data on disk
        Path(stream.temp_file.name).unlink()


def _info(info: Mapping[str, Any]) -> ObjectInfo:
    """Return what fsspec says of a file, in each client's own words."""
    modified = info.get("LastModified") or info.get("last_modified") or info.get("mtime")
    modified = modified or info.get("updated") or info.get("created") or 0
    version = next(filter(None, map(info.get, _VERSIONS)), None) or modified
    seconds = modified.timestamp() if isinstance(modified, datetime) else modified
    seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
    return ObjectInfo(int(info.get("size") or 0), str(version), seconds)
