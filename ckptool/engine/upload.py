"""A file of a store that is written from its beginning, and appears once it is whole."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from ckptool.engine.patience import said
from ckptool.engine.remote_path import RemotePath
from ckptool.errors import TransferError

PART = 8 << 20
"""Bytes of one part of an upload; S3 wants 5 MiB at least, and at most 10,000 of them."""
MEMORY = 2 * PART
"""Bytes that one upload holds."""
_MOST_PARTS = 9_000


class Upload:
    """One upload, in parts. The store's own client tries again where a part fails.

    A store whose files grow as they are written gets them under a hidden name first.
    """

    def __init__(self, place: RemotePath, nbytes: int) -> None:
        self._place = place
        self._nbytes = nbytes
        self._store = place.store
        self._part = max(PART, -(-nbytes // _MOST_PARTS))
        self._done = 0
        whole = self._store.whole_or_not
        self._hidden = None if whole else place.with_name(f".{place.name}.partial").key
        if not whole:
            self._attempt(lambda: self._store.fs.makedirs(place.parent.key, exist_ok=True))
        self._stream: Any = self._attempt(
            lambda: self._store.fs.open(self._hidden or place.key, "wb", block_size=self._part)
        )

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes; a full part is sent. TransferError where that fails."""
        view = memoryview(data)
        while view:
            room = self._part - self._done % self._part
            self._attempt(partial(self._stream.write, view[:room]))
            self._done += len(view[:room])
            view = view[room:]

    def close(self) -> None:
        """Make the file appear. TransferError where it is not what was written."""
        try:
            self._attempt(self._stream.close)
        except BaseException:
            self.abort()
            raise
        if self._hidden is not None:
            self._attempt(lambda: self._store.fs.mv(self._hidden, self._place.key))
        self._store.changed(self._place.key, self._nbytes)
        size = self._store.ask(str(self._place), lambda: self._store.fs.info(self._place.key))
        if size["size"] != self._nbytes:
            raise TransferError(f"{self._place}: has {size['size']:,} bytes, not {self._nbytes:,}")

    def abort(self) -> None:
        """Leave nothing behind: the parts that were sent are thrown away."""
        with suppress(Exception):
            self._stream.discard()
        with suppress(Exception):
            self._stream.closed = True
        if self._hidden is not None:
            with suppress(Exception):
                self._store.fs.rm_file(self._hidden)

    def _attempt(self, work: Any) -> Any:
        try:
            return work()
        except NotImplementedError:
            raise TransferError(f"{self._place}: this kind of store cannot be written to") from None
        except Exception as error:
            raise TransferError(
                f"{self._place}: byte {self._done:,} cannot be written: {said(error)}"
            ) from None
