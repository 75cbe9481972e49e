"""Places in stores, as tests ask for them."""

from __future__ import annotations

from typing import Any

from ckptool.storage.clients.fsspec_client import FsspecClient
from ckptool.storage.url import RemotePath, location


def in_store(url: str) -> RemotePath:
    """Return the place of a URL."""
    place = location(url)
    assert isinstance(place, RemotePath)
    return place


def file_system(place: RemotePath) -> Any:
    """Return the file system of fsspec in which a place lies."""
    client = place.store.client
    assert isinstance(client, FsspecClient)
    return client.fs
