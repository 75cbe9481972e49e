"""Ranged reads by fsspec's clients, checked for the listed version and the requested range.

The clients themselves (s3fs 2026.9, gcsfs 2026.10, adlfs 2026.8, fsspec 2026.9 for the web) check
neither: a proxy may return the whole file, or other bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ckptool.errors import Changed, Unsupported
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.url import AZURE, GOOGLE, S3, WEB, redact_url

_PARTIAL = 206
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")

AsyncRead = Callable[[Any, ObjectVersion, int, int], Coroutine[Any, Any, bytes]]
"""Reads bytes of a file with a file system, from one offset to another."""


def is_pinned(scheme: str, version: str) -> bool:
    """Return whether a read that names this version fails if another is there.

    Emulators of Google Cloud Storage ignore conditions: there files are listed again as well.
    """
    return scheme in (*S3, *AZURE) and version.startswith('"')


async def _read_s3(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
    bucket, key, _ = fs.split_path(file.key)
    pinned = is_pinned(S3[0], file.version)
    version = {"IfMatch": file.version} if pinned else {}
    wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
    answer = await fs._call_s3("get_object", **wanted, **version)
    try:
        status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
        size = answer.get("ContentLength")
        _require_range(file.key, status, answer.get("ContentRange"), size, start, end)
        if pinned:
            _require_version(f"s3://{file.key}", file, answer.get("ETag"))
        data: bytes = await answer["Body"].read()
        return data
    finally:
        answer["Body"].close()


async def _read_google(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
    """Read from an object of this generation; buckets in one zone are read by gRPC, unchecked."""
    if hasattr(fs, "_is_zonal_bucket") and await fs._is_zonal_bucket(fs.split_path(file.key)[0]):
        whole: bytes = await fs._cat_file(file.key, start=start, end=end)
        return whole
    pinned = file.version.isdecimal()
    version = {"ifGenerationMatch": file.version} if pinned else {}
    headers = {"Range": f"bytes={start}-{end - 1}"}
    try:
        status, given, _, data = await fs._request(
            "GET", fs.url(file.key), headers=headers, **version
        )
    except FileExistsError:  # gcsfs's error for 412
        raise _replaced(f"gs://{file.key}") from None
    _require_range(file.key, status, given.get("Content-Range"), len(data), start, end)
    if pinned:
        _require_version(f"gs://{file.key}", file, given.get("X-Goog-Generation"))
    read: bytes = data
    return read


async def _read_azure(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
    from azure.core import MatchConditions

    container, key, version_id = fs.split_path(file.key)
    pinned = is_pinned(AZURE[0], file.version) and version_id is None
    version: dict[str, Any] = {"version_id": version_id}
    if pinned:
        version = {"etag": file.version, "match_condition": MatchConditions.IfNotModified}
    answers: list[Any] = []

    def check() -> None:
        at = start
        for answer in answers:  # of parts longer than 32 MiB, one for each request
            said = answer.headers.get("Content-Range")
            size = int(answer.headers.get("Content-Length", -1))
            at += _require_range(file.key, answer.status_code, said, size, at, end)
            if pinned:
                _require_version(f"az://{file.key}", file, answer.headers.get("ETag"))

    async with fs.service_client.get_blob_client(container=container, blob=key) as blob:
        try:
            stream = await blob.download_blob(
                offset=start,
                length=end - start,
                raw_response_hook=lambda answer: answers.append(answer.http_response),
                **version,
                **fs._timeout_kwargs,
            )
            data: bytes = await stream.readall()
        except ValueError:  # there is no Content-Range
            check()
            raise
    check()
    return data


async def _read_web(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
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


RANGE_READS: Mapping[str, AsyncRead] = {
    **dict.fromkeys(S3, _read_s3),
    **dict.fromkeys(GOOGLE, _read_google),
    **dict.fromkeys(AZURE, _read_azure),
    **dict.fromkeys(WEB, _read_web),
}
"""How the files of each scheme are read."""


def _require_version(what: str, file: ObjectVersion, given: str | None) -> None:
    """Check the version of an answer, if it has one: a store may ignore conditions."""
    if given is not None and given != file.version:
        raise _replaced(what)


def _replaced(what: str) -> Changed:
    return Changed(f"{what}: it was replaced while it was read")


def _require_range(
    what: str, status: int, content_range: str | None, size: int | None, start: int, end: int
) -> int:
    """Check that an answer has the bytes from ``start`` to ``end`` (exclusive), or fewer.

    Returns how many. Raises Unsupported if the server returns only whole files, and OSError, which
    is retried, if it returned other bytes. A whole file (``size`` bytes) is accepted if all of it
    was wanted.
    """
    if status != _PARTIAL:
        if start == 0 and size is not None and size <= end:
            return size
        message = f"{what}: the server, or a proxy, does not answer requests for a part of a file"
        raise Unsupported(message, hint="download the checkpoint first")
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None or int(match[1]) != start or not start <= int(match[2]) < end:
        raise OSError(f"the answer covers other bytes: {content_range or 'no Content-Range'}")
    length = int(match[2]) + 1 - start
    if size is not None and size != length:
        raise OSError(f"the answer has {size:,} bytes and says {content_range}")
    return length
