"""Multipart uploads that were never completed: their parts cost storage, unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptool.errors import NoAnswer, NotFound

if TYPE_CHECKING:
    from ckptool.storage.store import Store


def abort_uploads(store: Store, head: str, chosen: Callable[[str], bool]) -> None:
    """Discard the parts of unfinished files whose keys begin with ``head`` and are chosen.

    Does nothing if they cannot be listed, as in all stores but S3, or without permission; what is
    found and cannot be discarded is added to ``remains`` of the store.
    """
    if not hasattr(store.fs, "call_s3"):
        return
    with suppress(NotFound, NoAnswer):
        for key, number in _list_uploads(store, head):
            if chosen(key):
                abort_upload(store, key, number)


def _list_uploads(store: Store, head: str) -> Iterator[tuple[str, str]]:
    """Yield keys and numbers of the unfinished files of S3 whose keys begin with ``head``."""
    bucket, _, prefix = head.partition("/")
    place: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    while place:
        page = store.ask(head, partial(store.fs.call_s3, "list_multipart_uploads", **place))
        for upload in page.get("Uploads", []):
            yield f"{bucket}/{upload['Key']}", upload["UploadId"]
        after = {name: page.get(f"Next{name}") for name in ("KeyMarker", "UploadIdMarker")}
        more = page.get("IsTruncated") and all(after.values())
        place = {**place, **after} if more else {}


def abort_upload(store: Store, key: str, number: str, nbytes: int = 0) -> None:
    """Discard the parts, of so many bytes, of an unfinished file of S3, or note that they stay."""
    bucket, _, name = key.partition("/")
    url = store.url(key)
    try:
        store.ask(url, lambda: store.fs.abort_mpu(bucket, name, number))
    except NotFound:
        return
    except NoAnswer:
        store.remains[url] = store.remains.get(url, 0) + nbytes
