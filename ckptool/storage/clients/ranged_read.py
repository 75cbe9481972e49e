"""Ranged reads whose answers are checked: a proxy may give the whole file, or other bytes."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping
from functools import cached_property
from typing import Any, Protocol

from ckptool.errors import Changed, Unsupported
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.url import WEB, redact_url

S3 = ("s3", "s3a")
_PARTIAL = 206
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class RangeReader(Protocol):
    """Reads parts of a store's files, one request each."""

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer where the file ends before.

        Raises what the store's client raises: each has errors of its own.
        """


class FsspecReader:
    """Reads with a file system of fsspec; a request is given up after ``timeout`` seconds.

    ``sizes`` are the bytes of the files that were listed.
    """

    def __init__(self, fs: Any, scheme: str, sizes: Mapping[str, int], timeout: float) -> None:
        self._fs = fs
        self._scheme = scheme
        self._sizes = sizes
        self._timeout = timeout

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer where the file ends before."""
        if is_s3(self._fs):
            data = wait(self._fs, _read_s3_range(self._fs, file, start, end), self._timeout)
        elif self._scheme in WEB:
            data = wait(self._fs, _read_web_range(self._fs, file, start, end), self._timeout)
        else:
            # fsspec's own way also reads some MiB behind a part, unless it is told not to.
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
        """Return what the store says of a file now, or that there is a folder."""
        self._fs.invalidate_cache()
        return dict(call(self._fs, "_info", self._timeout, key))

    def get(self, key: str) -> bytes:
        """Return all of a small file."""
        data: bytes = self._fs.cat_file(key)
        return data

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer where the file ends before."""
        return self._reader.read(file, start, end)


def is_s3(fs: Any) -> bool:
    """Return whether a file system is s3fs's."""
    return hasattr(fs, "_call_s3")


def is_pinned(scheme: str, version: str) -> bool:
    """Return whether a read that names this version fails where another is there."""
    return scheme in S3 and version.startswith('"')


def call(fs: Any, method: str, timeout: float, *arguments: Any, **named: Any) -> Any:
    """Call a method of a file system; give up after a time where it can be given up."""
    if not fs.async_impl:
        return getattr(fs, method.removeprefix("_"))(*arguments, **named)
    return wait(fs, getattr(fs, method)(*arguments, **named), timeout)


def wait(fs: Any, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
    """Wait for a coroutine of a file system; give up after a time."""
    from fsspec.asyn import sync

    return sync(fs.loop, lambda: work, timeout=timeout)


async def _read_s3_range(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
    """Read bytes of an object, of the version that was listed where it can be named.

    s3fs itself (2026.9) looks neither at the version nor at what range was answered.
    """
    bucket, key, _ = fs.split_path(file.key)
    pinned = is_pinned(S3[0], file.version)
    version = {"IfMatch": file.version} if pinned else {}
    wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
    answer = await fs._call_s3("get_object", **wanted, **version)
    try:
        status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
        size = answer.get("ContentLength")
        _require_range(file.key, status, answer.get("ContentRange"), size, start, end)
        if pinned and answer.get("ETag", file.version) != file.version:
            raise Changed(f"s3://{file.key}: it was replaced while it was read")
        data: bytes = await answer["Body"].read()
        return data
    finally:
        answer["Body"].close()


async def _read_web_range(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
    """Read bytes of a file of a web server; fsspec itself (2026.9) does not look at their range."""
    session = await fs.set_session()
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    settings = fs.kwargs | {"headers": fs.kwargs.get("headers", {}) | headers}
    async with session.get(fs.encode_url(file.key), **settings) as answer:
        fs._raise_not_found_for_status(answer, file.key)
        given = answer.headers.get("Content-Range")
        size = answer.content_length
        _require_range(redact_url(file.key), answer.status, given, size, start, end)
        data: bytes = await answer.read()
        return data


def _require_range(
    what: str, status: int, content_range: str | None, size: int | None, start: int, end: int
) -> None:
    """Check that an answer holds the bytes from ``start`` on, ``end`` excluded, maybe fewer.

    Raises Unsupported where the server gives whole files only, and OSError, which is tried again,
    where it gave other bytes. A whole file (``size`` bytes) is as good where all of it was wanted.
    """
    if status != _PARTIAL:
        if start == 0 and size is not None and size <= end:
            return
        message = f"{what}: the server, or a proxy, does not answer requests for a part of a file"
        raise Unsupported(message, hint="download the checkpoint first")
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None or int(match[1]) != start or not start <= int(match[2]) < end:
        raise OSError(f"the answer is of other bytes: {content_range or 'no Content-Range'}")
    length = int(match[2]) + 1 - start
    if size is not None and size != length:
        raise OSError(f"the answer has {size:,} bytes and says {content_range}")
