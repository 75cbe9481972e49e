"""Ranged reads with file systems of fsspec, and their other reads."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from functools import cached_property
from typing import Any, Protocol

from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients.checked_ranges import RANGE_READS


class RangeReader(Protocol):
    """Reads parts of a store's files, one request each."""

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before.

        Raises the errors of the store's client: each has its own.
        """


class FsspecReader:
    """Reads with a file system of fsspec; a request times out after ``timeout`` seconds.

    ``sizes`` are the bytes of the files that were listed.
    """

    def __init__(self, fs: Any, scheme: str, sizes: Mapping[str, int], timeout: float) -> None:
        self._fs = fs
        self._scheme = scheme
        self._sizes = sizes
        self._timeout = timeout

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before."""
        if (read := RANGE_READS.get(self._scheme)) is not None:
            data = wait(self._fs, read(self._fs, file, start, end), self._timeout)
        else:
            # by default fsspec also reads some MiB after a part
            plain = {"cache_type": "none", "size": self._sizes.get(file.key)}
            limits = {"start": start, "end": end} | (plain if self._is_plain else {})
            data = call(self._fs, "_cat_file", self._timeout, file.key, **limits)
        return memoryview(data)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether parts are read in fsspec's own way."""
        from fsspec import AbstractFileSystem

        own = type(self._fs).cat_file is not AbstractFileSystem.cat_file
        return not (own or self._fs.async_impl)


class FsspecClient:
    """Lists and reads with a file system of fsspec; ``reader`` reads parts of files."""

    def __init__(self, fs: Any, reader: RangeReader, timeout: float) -> None:
        self._fs = fs
        self._reader = reader
        self._timeout = timeout

    def find(self, key: str) -> Mapping[str, dict[str, Any]] | list[str]:
        """Return all files below a place, or the file there (adlfs 2026.8: its name)."""
        self._fs.invalidate_cache()
        found: Mapping[str, dict[str, Any]] | list[str] = self._fs.find(key, detail=True)
        return found

    def info(self, key: str) -> dict[str, Any]:
        """Return the store's current information on a file, or that there is a folder."""
        self._fs.invalidate_cache()
        return dict(call(self._fs, "_info", self._timeout, key))

    def get(self, key: str) -> bytes:
        """Return all of a small file."""
        data: bytes = self._fs.cat_file(key)
        return data

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before."""
        return self._reader.read(file, start, end)


def is_s3(fs: Any) -> bool:
    """Return whether a file system is s3fs's."""
    return hasattr(fs, "_call_s3")


def call(fs: Any, method: str, timeout: float, *arguments: Any, **named: Any) -> Any:
    """Call a method of a file system; with a timeout if it can be cancelled."""
    if not fs.async_impl:
        return getattr(fs, method.removeprefix("_"))(*arguments, **named)
    return wait(fs, getattr(fs, method)(*arguments, **named), timeout)


def wait(fs: Any, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
    """Wait for a coroutine of a file system, with a timeout."""
    from fsspec.asyn import sync

    return sync(fs.loop, lambda: work, timeout=timeout)
