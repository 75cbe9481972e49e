"""A file of a store that is written from its beginning, and appears once it is whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from ckptool.engine.parts import Parts, part_of, parts_of
from ckptool.engine.patience import is_ours, said
from ckptool.engine.remote_path import RemotePath
from ckptool.errors import CkptoolError, TransferError

_T = TypeVar("_T")


def memory_of_part(nbytes: int) -> int:
    """Bytes that an upload of ``nbytes`` takes for each part it holds, with the client's copy."""
    return 2 * part_of(nbytes)


def hidden_name(path: str) -> str:
    """What a file is called until it is whole, where a store shows files that are not."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.partial"


class Upload:
    """One upload, in parts; there is ``room`` for so many in memory, with that which is filled.

    A store whose files grow as they are written gets them under a hidden name first.
    """

    def __init__(self, place: RemotePath, nbytes: int, room: int = 1) -> None:
        self._place = place
        self._nbytes = nbytes
        self._store = place.store
        self._done = 0
        whole = self._store.whole_or_not
        self._hidden = None if whole else place.with_name(hidden_name(place.name)).key
        if not whole:
            self._attempt(lambda: self._store.fs.makedirs(place.parent.key, exist_ok=True))
        key = self._hidden or place.key
        self._parts: Parts = self._attempt(lambda: parts_of(self._store, key, nbytes, room))
        self._pool = ThreadPoolExecutor(self._parts.together, "ckptool-send")
        self._sending: deque[Future[None]] = deque()
        self._number = 0
        self._part = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes; a full part is sent. TransferError where that, or one before, fails."""
        view = memoryview(data)
        while view:
            taken = view[: self._parts.part - len(self._part)]
            self._part += taken
            self._done += len(taken)
            view = view[len(taken) :]
            if len(self._part) == self._parts.part:
                self._send()

    def finish(self) -> None:
        """Send what is left, and wait until all was taken; ``close`` then makes the file appear."""
        if self._part:
            self._send()
        self._wait(0)

    def close(self) -> None:
        """Make the file appear. TransferError where it is not what was written."""
        try:
            self.finish()
            self._attempt(self._parts.complete)
        except BaseException:
            self.abort()
            raise
        self._pool.shutdown()
        if self._hidden is not None:
            self._attempt(lambda: self._store.fs.mv(self._hidden, self._place.key))
        self._store.changed(self._place.key, self._nbytes)
        size = self._store.ask(str(self._place), lambda: self._store.fs.info(self._place.key))
        if size["size"] != self._nbytes:
            raise TransferError(f"{self._place}: has {size['size']:,} bytes, not {self._nbytes:,}")

    def abort(self) -> None:
        """Leave nothing behind: once no part is on its way, those sent are thrown away."""
        self._pool.shutdown(cancel_futures=True)
        self._parts.discard()
        if self._hidden is not None:
            with suppress(Exception):
                self._store.fs.rm_file(self._hidden)

    def _send(self) -> None:
        """Send the part that was filled; as many stay on their way as there is room for."""
        number, data = self._number, self._part
        self._number, self._part = number + 1, bytearray()
        self._sending.append(self._pool.submit(self._parts.put, number, data))
        del data
        self._wait(self._parts.held - 1)

    def _wait(self, most: int) -> None:
        while len(self._sending) > most:
            self._attempt(self._sending.popleft().result)

    def _attempt(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except NotImplementedError:
            raise TransferError(f"{self._place}: this kind of store cannot be written to") from None
        except Exception as error:
            if is_ours(error):
                raise
            reason = error.message if isinstance(error, CkptoolError) else said(error)
            raise TransferError(
                f"{self._place}: byte {self._done:,} cannot be written: {reason}"
            ) from None
