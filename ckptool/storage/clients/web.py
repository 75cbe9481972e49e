"""Web servers, which list nothing and are not written to."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ckptool.errors import Unsupported
from ckptool.storage.clients.answers import Answer
from ckptool.storage.clients.client import ObjectInfo, ObjectVersion
from ckptool.storage.clients.obstore_client import ObstoreClient, info_of
from ckptool.storage.clients.schemes import unaccepted
from ckptool.storage.clients.service import Service, Settings

_PLAIN = re.compile(r"[A-Za-z0-9][\w.\-]*", re.ASCII)
"""Names that are the same in a URL."""
_DOT = re.compile(r"/(?:\.|%2e)(?=/|$)", re.IGNORECASE)
_SMALL = 1 << 20
"""Bytes of a file that may be read as a whole where no parts of it are sent."""
_SAFE = "/%:@!$&'()*+,;=~-._"
"""Characters of a path that need no quotes, or are one."""


class Web(Service):
    """Files of web servers, whose keys are their URLs.

    ``options`` are ``headers``, and ``ssl`` if no certificate is checked, as for aiohttp.
    """

    pins = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        rest = dict(self.options)
        client = {**rest.pop("client_kwargs", {})}
        self._headers = {**client.pop("headers", {}), **rest.pop("headers", {})}
        self._checks = client.pop("ssl", rest.pop("ssl", True)) is not False
        if unknown := [*rest, *client]:
            raise unaccepted(url, ", ".join(unknown), "headers and ssl are accepted")

    def key(self, url: str) -> str:
        """Return the URL itself."""
        return url

    def url(self, key: str) -> str:
        """Return the URL itself."""
        return key

    def split(self, key: str) -> tuple[str, str]:
        """Return the folder and name that obstore requests for a URL."""
        return split_url(quoted_url(key))

    def open(self, folder: str, settings: Settings) -> Any:
        """Return obstore's store for a folder, or for one file."""
        from obstore.store import HTTPStore

        parts = urlsplit(folder)
        headers = dict(self._headers)
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(credentials.encode()).decode()}"
            host = parts.netloc.rpartition("@")[2]
            folder = urlunsplit(parts._replace(netloc=host))
        more = {} if self._checks else {"allow_invalid_certificates": True}
        options = settings.options(folder, default_headers=headers, **more)
        return HTTPStore.from_url(folder, **options)


class WebClient(ObstoreClient):
    """Reads web servers. Some answer HEAD in another way than a read, whose answer counts."""

    def info(self, key: str) -> ObjectInfo | None:
        """Return what the server says of a file; Unsupported if that lacks its size."""
        try:
            return super().info(key)
        except (Answer, FileNotFoundError, Unsupported) as error:
            if isinstance(error, Answer) and error.status is None:
                raise
        return self._ask(  # of which nothing is read
            key, lambda obstore, store, name: info_of(obstore.get(store, name).meta)
        )

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, of a small file also if it is sent whole."""
        try:
            return super().read(file, start, end)
        except Unsupported:
            data = self._ask(file.key, _read_small)
            if data is None:
                raise
        return data[start:end]


def _read_small(obstore: Any, store: Any, name: str) -> memoryview | None:
    """Return all of a file, None if it is too large to be sent for each part of it."""
    answer = obstore.get(store, name)
    if (nbytes := answer.meta["size"]) > _SMALL:
        return None
    data = memoryview(answer.bytes())
    if len(data) != nbytes:
        raise OSError(f"{len(data):,} bytes received of {nbytes:,}")
    return data


def quoted_url(url: str) -> str:
    """Return a URL with what may not be in one quoted, and without a fragment."""
    parts = urlsplit(url)
    path, query = quote(_DOT.sub("", parts.path), safe=_SAFE), quote(parts.query, safe=f"{_SAFE}?")
    return urlunsplit(parts._replace(path=path, query=query, fragment=""))


def split_url(url: str) -> tuple[str, str]:
    """Return the folder and name that obstore (0.12) would request for the URL of a file.

    The name is empty if it, or the folder, would be requested under another: obstore quotes names,
    and puts those of a folder after its query.
    """
    folder, _, name = url.rpartition("/")
    return (folder, name) if _PLAIN.fullmatch(name) and "?" not in folder else (url, "")
