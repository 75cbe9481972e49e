"""Ranged reads whose answers are checked: a proxy may give the whole file, or other bytes."""

from __future__ import annotations

import re
from typing import Any

from ckptool.errors import Unsupported
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.url import redact_url

_PARTIAL = 206
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


async def read_s3_range(
    fs: Any, file: ObjectVersion, start: int, end: int, *, pinned: bool
) -> bytes:
    """Read bytes of an object, of the version that was listed where ``pinned``.

    s3fs itself (2026.9) looks neither at the version nor at what range was answered.
    """
    bucket, key, _ = fs.split_path(file.key)
    version = {"IfMatch": file.version} if pinned else {}
    wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
    answer = await fs._call_s3("get_object", **wanted, **version)
    try:
        status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
        size = answer.get("ContentLength")
        _require_range(file.key, status, answer.get("ContentRange"), size, start, end)
        data: bytes = await answer["Body"].read()
        return data
    finally:
        answer["Body"].close()


async def read_web_range(fs: Any, file: ObjectVersion, start: int, end: int) -> bytes:
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
