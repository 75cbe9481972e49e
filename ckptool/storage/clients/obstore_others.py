"""Ranged reads of other stores with obstore: Google Cloud Storage, Azure and web servers.

fsspec's client is in charge: it determines the store's address, and gives obstore its credentials
as long as they last. What obstore cannot read, the client reads, or reports why it cannot.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients.obstore_s3 import (
    KEPT,
    TRIALS,
    ObstoreReader,
    has_proxies,
    is_available,
    is_forked,
    open_store,
    read_range,
)
from ckptool.storage.clients.ranged_read import RangeReader, is_s3, wait
from ckptool.storage.clients.turns import Turns
from ckptool.storage.url import AZURE, GOOGLE, WEB

_PLAIN = re.compile(r"[A-Za-z0-9][\w.\-]*", re.ASCII)
"""Characters that are the same in a URL."""
_AMBIGUOUS = re.compile(r"/\.{1,2}(?:/|$)|%2e|#", re.IGNORECASE)
"""Parts of a URL that clients may omit, each in its own way."""
_SCOPE = "https://storage.azure.com/.default"
"""The scope of tokens that azure-storage-blob (12.31) requests."""


class _Way(NamedTuple):
    """How obstore reads what a file system reads.

    ``split`` returns the place that obstore connects to and a file's name in it, None if obstore
    would read another; ``connect`` returns obstore's store for such a place, None if it does not
    know one; ``version`` the part of a listed version that obstore can name, or compare.
    """

    split: Callable[[Any, ObjectVersion], tuple[str, str] | None]
    connect: Callable[[Any, str, float], Any]
    version: re.Pattern[str]


class ObstoreOtherReader:
    """Reads parts of files with obstore; ``reader`` reads the rest with fsspec's client."""

    def __init__(self, fs: Any, way: _Way, reader: RangeReader, timeout: float) -> None:
        self._fs = fs
        self._way = way
        self._reader = reader
        self._timeout = timeout
        self._stores: dict[str, Any] = {}
        self._has_read = False
        self._failed = 0
        self._turns = Turns()

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before."""
        works = self._has_read or self._failed < TRIALS
        place = self._way.split(self._fs, file) if works and not is_forked() else None
        if place is None or self._turns.are_others(file.key):
            return self._reader.read(file, start, end)
        data = self._read(place, file, start, end)
        if data is None:
            return self._reader.read(file, start, end)
        self._has_read = True
        return data

    def _read(
        self, place: tuple[str, str], file: ObjectVersion, start: int, end: int
    ) -> memoryview | None:
        """Return what obstore reads; None if it cannot. Raises Busy."""
        folder, name = place
        if folder not in self._stores:
            connect = partial(self._way.connect, self._fs, folder, self._timeout)
            self._stores[folder] = open_store(connect)
        if (store := self._stores[folder]) is None:
            return None
        version = file.version if self._way.version.fullmatch(file.version) else None
        data = None
        try:
            data = read_range(store, name, version, start, end)
        except Exception as error:  # noqa: BLE001 (whatever it is, fsspec is asked and says so)
            self._turns.require_answer(file.key, error)
        finally:
            self._failed += data is None
        return data


def by_obstore(fs: Any, scheme: str, reader: RangeReader, timeout: float) -> RangeReader:
    """Return a reader on obstore, if that would ask as the file system does, else ``reader``.

    Each client treats proxies in its own way; s3fs reports its use of them.
    """
    if not is_available():
        return reader
    if is_s3(fs):
        return ObstoreReader(fs, reader, timeout)
    if has_proxies() or (way := _WAYS.get(scheme)) is None:
        return reader
    return ObstoreOtherReader(fs, way, reader, timeout)


def _split_key(fs: Any, file: ObjectVersion) -> tuple[str, str] | None:
    """Return a bucket, or container, and a key in it; None if a version of it is named."""
    bucket, key, version = fs.split_path(file.key)
    return (bucket, key) if version is None and key == key.strip("/") else None


def _split_web(fs: Any, file: ObjectVersion) -> tuple[str, str] | None:
    url = str(fs.encode_url(file.key))
    return None if _AMBIGUOUS.search(url) else split_url(url)


def split_url(url: str) -> tuple[str, str]:
    """Return the folder and name that obstore (0.12) would request for the URL of a file.

    The name is empty if it, or the folder, would be requested under another: obstore quotes names,
    and puts those of a folder after its query.
    """
    folder, _, name = url.rpartition("/")
    return (folder, name) if _PLAIN.fullmatch(name) and "?" not in folder else (url, "")


def _connect_web(fs: Any, folder: str, timeout: float) -> Any:
    """Return obstore's store for a URL; None with settings of aiohttp."""
    from obstore.store import HTTPStore

    if fs.kwargs or fs.client_kwargs:
        return None
    return HTTPStore.from_url(folder, **_options("http:", timeout))


def _connect_google(fs: Any, bucket: str, timeout: float) -> Any:
    """Return obstore's store for a bucket; None with settings of aiohttp, or certificates.

    A header names the payer, as google-auth (2.62) sends a quota project.
    """
    from obstore.store import GCSStore

    if fs.session_kwargs or getattr(fs, "_use_client_cert", False):
        return None
    held = fs.credentials.credentials
    payer = fs.requester_pays and (fs.project if fs.requester_pays is True else fs.requester_pays)
    payer = payer or getattr(held, "quota_project_id", None)

    def credentials() -> Any:
        fs.credentials.maybe_refresh()
        return {"token": held.token, "expires_at": datetime.now(UTC) + KEPT}

    return GCSStore(
        bucket,
        config={"base_url": fs._location, "skip_signature": held is None},
        credential_provider=None if held is None else credentials,
        **_options(fs._location, timeout, {"x-goog-user-project": payer} if payer else {}),
    )


def _connect_azure(fs: Any, container: str, timeout: float) -> Any:
    """Return obstore's store for a container; None if adlfs has other kinds of credentials."""
    from obstore.store import AzureStore

    client = fs.service_client
    url, held = urlsplit(client.url), client.credential
    credentials: Callable[[], Any] | None = None
    if hasattr(held, "account_key"):
        credentials = _lasting(access_key=held.account_key)
    elif url.query:
        credentials = _lasting(sas_token=url.query)
    elif inspect.iscoroutinefunction(getattr(held, "get_token", None)):

        def credentials() -> Any:
            token = wait(fs, held.get_token(_SCOPE), timeout).token
            return {"token": token, "expires_at": datetime.now(UTC) + KEPT}

    elif held is not None:
        return None
    if fs.location_mode != "primary":
        return None
    return AzureStore(
        container,
        config={
            "account_name": client.account_name,
            "endpoint": f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}",
            "use_emulator": False,
            "use_fabric_endpoint": False,
            "skip_signature": credentials is None,
        },
        credential_provider=credentials,
        **_options(client.url, timeout),
    )


def _lasting(**credential: str) -> Callable[[], Any]:
    return lambda: {**credential, "expires_at": None}


def _options(url: str, timeout: float, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return settings for requests that are sent once, with a timeout in seconds."""
    time = timedelta(seconds=timeout)
    client = {
        "allow_http": url.startswith("http:"),
        "connect_timeout": time,
        "timeout": time,
        "default_headers": dict(headers or {}),
    }
    return {
        "client_options": client,
        "retry_config": {"max_retries": 0, "retry_timeout": time},
    }


_WAYS: Mapping[str, _Way] = {
    **dict.fromkeys(GOOGLE, _Way(_split_key, _connect_google, re.compile(r"\d+"))),
    **dict.fromkeys(AZURE, _Way(_split_key, _connect_azure, re.compile(r'".+"'))),
    **dict.fromkeys(WEB, _Way(_split_web, _connect_web, re.compile(r"(?!)"))),
}
"""How obstore reads the files of each scheme."""
