"""Ranged reads of S3 with obstore, a client in Rust: a sixth of s3fs's processor time.

s3fs is in charge. Its first read of a bucket shows where its requests go, after redirects, and how
they are signed; obstore then asks there, with the credentials of s3fs. What obstore cannot read,
s3fs reads, or reports why it cannot; but a refused request is not repeated.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients.checked_ranges import is_pinned
from ckptool.storage.clients.ranged_read import RangeReader, wait
from ckptool.storage.clients.turns import Turns
from ckptool.storage.url import S3

_SENDING = "before-send.s3.GetObject"
_SIGNED = "AWS4-HMAC-SHA256 Credential="
_UNDERSTOOD = {
    "x-amz-checksum-mode",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-request-payer",
    "x-amz-security-token",
}
"""Headers of S3 that obstore sends as well, or that do not matter for partial reads."""
KEPT = timedelta(minutes=6)
"""Stated lifetime of credentials: obstore (0.12) renews them five minutes before its end."""
_REFUSAL = re.compile(
    r"status code: (4(?!08|29)\d\d)\b.*?<Code>(\w+)</Code>.*?<Message>(.*?)</Message>", re.DOTALL
)
"""How obstore (0.12) quotes an answer that asking again does not change."""
TRIALS = 3
"""Reads that may fail in obstore but not in s3fs before obstore is no longer tried."""
_processes: set[int] = set()
"""The process in which obstore runs."""


class ObstoreReader:
    """Reads parts of S3 objects with obstore; ``reader`` reads the rest with s3fs."""

    def __init__(self, fs: Any, reader: RangeReader, timeout: float) -> None:
        self._fs = fs
        self._reader = reader
        self._timeout = timeout
        self._buckets: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._trial = threading.Lock()
        self._has_read = False
        self._failed = 0
        self._turns = Turns()

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before."""
        bucket, key, version_id = self._fs.split_path(file.key)
        is_usable = self._is_usable(key) and version_id is None
        if not is_usable or self._turns.are_others(key):
            return self._reader.read(file, start, end)
        if bucket not in self._buckets and self._lock.acquire(blocking=False):
            try:
                return self._read_first(bucket, key, file, start, end)
            finally:
                self._lock.release()
        if (store := self._buckets.get(bucket)) is None:
            return self._reader.read(file, start, end)
        version = file.version if is_pinned(S3[0], file.version) else None
        if self._has_read:
            data = _read(store, key, version, start, end, self._turns)
            return self._reader.read(file, start, end) if data is None else data
        if not self._trial.acquire(blocking=False):
            return self._reader.read(file, start, end)
        try:
            return self._try(store, key, version, file, start, end)
        finally:
            self._trial.release()

    def _try(
        self, store: Any, key: str, version: str | None, file: ObjectVersion, start: int, end: int
    ) -> memoryview:
        """Read with obstore before its first success: a failure may be its own fault."""
        data = _read(store, key, version, start, end)
        if data is not None:
            self._has_read = True
            return data
        data = self._reader.read(file, start, end)
        self._failed += 1
        return data

    def _is_usable(self, key: str) -> bool:
        """Whether obstore, in this process, can read objects of such names."""
        works = self._has_read or self._failed < TRIALS
        return works and key == key.strip("/") and not is_forked()

    def _read_first(
        self, bucket: str, key: str, file: ObjectVersion, start: int, end: int
    ) -> memoryview:
        """Read with s3fs, and learn from its request how to address the bucket."""
        sent: list[Any] = []

        def note(request: Any, **_: object) -> None:
            sent.append(request)

        events = wait(self._fs, _listen(self._fs, note), self._timeout)
        try:
            data = self._reader.read(file, start, end)
        finally:
            events.unregister(_SENDING, note)
        for request in reversed(sent):
            where = unquote(urlsplit(request.url).path)
            if where.endswith(f"/{key}"):
                self._buckets[bucket] = _connect(self._fs, request, bucket, key, self._timeout)
                break
        return data


def is_available() -> bool:
    """Return whether obstore is installed."""
    return find_spec("obstore") is not None


def is_forked() -> bool:
    """Return whether obstore ran in the process that this one was forked from: it would hang."""
    return bool(_processes) and os.getpid() not in _processes


def has_proxies() -> bool:
    """Return whether the environment names proxies: each client treats them in its own way."""
    names = {name.lower() for name, value in os.environ.items() if value}
    return any(name.endswith("_proxy") for name in names - {"no_proxy"})


async def _listen(fs: Any, note: Callable[..., None]) -> Any:
    """Record each request of a read as it is sent; return a function that ends this."""
    client = await fs.set_session()
    client.meta.events.register(_SENDING, note)
    return client.meta.events


def _read(
    store: Any, key: str, version: str | None, start: int, end: int, turns: Turns | None = None
) -> memoryview | None:
    """Return bytes of an object; None if there is no answer, or a different one.

    With ``turns`` raises a refusal as s3fs does, and Busy.
    """
    try:
        return read_range(store, key, version, start, end)
    except Exception as error:  # noqa: BLE001 (whatever else it is, s3fs is asked and says so)
        if turns is not None:
            raise_answer(turns, key, error)
        return None


def read_range(
    store: Any, key: str, version: str | None, start: int, end: int
) -> memoryview | None:
    """Return bytes of an object; None if the answer has others. Raises obstore's errors.

    A version that is not an ETag, in quotes, is Google's generation, which obstore (0.12) cannot
    send as a condition. It checks the status and Content-Range itself, but not how many bytes come.
    """
    import obstore

    has_etag = version is not None and version.startswith('"')
    options: Any = {"range": (start, end)} | ({"if_match": version} if has_etag else {})
    answer = obstore.get(store, key, options=options)
    data = memoryview(answer.bytes())
    meta = answer.meta
    is_whole = len(data) == min(end, meta["size"]) - start
    return (
        data if is_whole and version in (None, meta["e_tag" if has_etag else "version"]) else None
    )


def raise_answer(turns: Turns, place: str, error: Exception) -> None:
    """Raise the answer of S3 that an obstore error quotes: a refusal as s3fs does, or Busy.

    Returns if it quotes neither: s3fs may get another answer.
    """
    turns.require_answer(place, error)
    if (refusal := _refusal_of(error)) is not None:
        raise refusal from refusal.__cause__


def _refusal_of(error: Exception) -> Exception | None:
    """Return the error that s3fs raises if S3 refuses; None if asking again may help."""
    refusal = _REFUSAL.search(str(error))
    return None if refusal is None else _translated(*refusal.groups())


def _translated(status: str, code: str, message: str) -> Exception:
    """Return the error that s3fs raises for an answer of S3."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    said: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": int(status)},
    }
    error: Exception = translate_boto_error(ClientError(said, "GetObject"))
    return error


def _connect(fs: Any, request: Any, bucket: str, key: str, timeout: float) -> Any:
    """Return obstore's store for a bucket; None if it would not ask as ``request`` did."""
    settings = s3_settings(request.url, request.headers, bucket, key)
    config = fs._s3.meta.config
    if settings is None or config.proxies or config.client_cert:
        return None
    options = {
        "connect_timeout": timedelta(seconds=config.connect_timeout),
        "read_timeout": timedelta(seconds=config.read_timeout),
        "timeout": timedelta(seconds=timeout),
    }

    def credentials() -> Any:
        return wait(fs, _credentials(fs), timeout)

    return open_s3(bucket, settings, options | _trust(fs), credentials)


def open_s3(
    bucket: str,
    settings: Mapping[str, Any],
    client_options: Mapping[str, Any],
    credentials: Callable[[], Any],
) -> Any:
    """Return obstore's store for a bucket; None if this version does not know a setting."""
    endpoint = settings["endpoint"]

    def make() -> Any:
        from obstore.store import S3Store

        return S3Store(
            bucket,
            # obstore prefers the endpoint that the environment has for S3
            config=cast("Any", {**settings, "aws_endpoint_url_s3": endpoint}),
            client_options=cast(
                "Any", {**client_options, "allow_http": endpoint.startswith("http:")}
            ),
            retry_config={"max_retries": 0, "retry_timeout": client_options["timeout"]},
            credential_provider=credentials,
        )

    return open_store(make)


def open_store(make: Callable[[], Any]) -> Any:
    """Return a store of obstore as created; None if this version does not know a setting."""
    _processes.add(os.getpid())
    try:
        return make()
    except Exception:  # noqa: BLE001 (whatever it is, fsspec's client is asked and says so)
        return None


def s3_settings(
    url: str, headers: Mapping[str, str | bytes], bucket: str, key: str
) -> dict[str, Any] | None:
    """Return obstore's settings for a bucket, from a request that read ``key`` in it.

    None if the request has headers that obstore would not send, or another kind of signature.
    """
    texts = {name.lower(): _text(value) for name, value in headers.items()}
    if {name for name in texts if name.startswith("x-amz-")} - _UNDERSTOOD:
        return None
    signature = texts.get("authorization")
    scope = (signature or "").removeprefix(_SIGNED).partition(",")[0].split("/")
    if signature is not None and (len(scope) != 5 or scope[3:] != ["s3", "aws4_request"]):
        return None
    parts = urlsplit(url)
    path, inside = unquote(parts.path), f"/{bucket}/{key}"
    if not path.endswith(inside) and path != f"/{key}":
        return None
    before = path.removesuffix(inside) if path.endswith(inside) else ""
    endpoint = f"{parts.scheme}://{parts.netloc}{before}"
    return {
        "endpoint": endpoint,
        "region": scope[2] if signature is not None else "us-east-1",
        "virtual_hosted_style_request": not path.endswith(inside),
        "skip_signature": signature is None,
        "request_payer": "x-amz-request-payer" in texts,
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _trust(fs: Any) -> dict[str, Any]:
    """Return the trusted certificates, from botocore's settings."""
    verify = fs.client_kwargs.get("verify", fs.session.get_config_variable("ca_bundle"))
    if isinstance(verify, str):
        return {"root_certificate": Path(verify).read_bytes()}
    return {"allow_invalid_certificates": True} if verify is False else {}


async def _credentials(fs: Any) -> dict[str, Any]:
    """Return s3fs's credentials, renewed by botocore if they are about to expire."""
    given = fs.client_kwargs
    key = fs.key or given.get("aws_access_key_id")
    if key is not None:
        secret = fs.secret or given.get("aws_secret_access_key")
        token = fs.token or given.get("aws_session_token")
        return {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": token,
            "expires_at": None,
        }
    held = await fs.session.get_credentials()
    frozen = await held.get_frozen_credentials()
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + KEPT,
    }
