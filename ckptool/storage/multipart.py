"""A file of a store that is written from its beginning, and appears once it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from ckptool.errors import CkptoolError, NoAnswer, Problem, TransferError, error_text
from ckptool.storage.clients import client
from ckptool.storage.clients.retry import is_ours
from ckptool.storage.url import RemotePath

_T = TypeVar("_T")
PART = 8 << 20
"""Bytes of one part of an upload; S3 wants 5 MiB at least, and at most 10,000 of them."""
_MOST_PARTS = 9_000
_PIECE = 1 << 20
"""Bytes that are handed to the sending thread together, whose client joins them to parts."""


def part_size(nbytes: int) -> int:
    """Return the bytes of each part of a file of ``nbytes``."""
    return max(PART, -(-nbytes // _MOST_PARTS))


def memory_of_part(nbytes: int) -> int:
    """Return the bytes of memory for each part of an upload, including the client's copy."""
    return 2 * part_size(nbytes)


def hidden_name(path: str) -> str:
    """Return a file's name until it is complete, for stores that show unfinished files."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.partial"


class Upload:
    """One upload, in parts: ``capacity`` of them fit in memory, including the one being filled.

    A file of one part is sent whole. A store whose files grow as they are written gets them under a
    hidden name first.
    """

    def __init__(self, place: RemotePath, nbytes: int, capacity: int = 1) -> None:
        self._place = place
        self._nbytes = nbytes
        self._store = place.store
        self._done = 0
        self._piece = bytearray()
        self._key = place.key
        self._pieces = _Pieces()
        self._sent: Future[None] | None = None
        if not self._store.atomic_put:
            self._key = place.with_name(hidden_name(place.name)).key
            self._attempt(lambda: self._store.make_folder(place.parent.key, str(place)))
        part = part_size(nbytes)
        self._most = part
        if nbytes > part or not self._store.atomic_put:
            self._most = _PIECE
            upload = client.Upload(nbytes, part, max(1, capacity - 1))
            pool = ThreadPoolExecutor(1, "ckptool-send")
            self._sent = pool.submit(self._store.upload, self._key, self._pieces, upload)
            self._sent.add_done_callback(lambda _: self._pieces.end())
            pool.shutdown(wait=False)

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes, which are sent a part at a time; TransferError if that fails."""
        view = memoryview(data)
        while view:
            piece = view[: self._most - len(self._piece)]
            self._piece += piece
            self._done += len(piece)
            view = view[len(piece) :]
            if len(self._piece) == self._most and self._sent is not None:
                self._hand_over(self._sent)

    def close(self) -> None:
        """Send the rest and make the file appear; TransferError if it is not what was written."""
        try:
            if self._sent is None:
                whole, self._piece = self._piece, bytearray()
                self._attempt(lambda: self._store.put(self._key, whole, str(self._place)))
            else:
                self._hand_over(self._sent)
                self._pieces.end()
                self._attempt(self._sent.result)
        except BaseException:
            self.abort()
            raise
        self._appear()

    def _appear(self) -> None:
        """Give a hidden file its name; TransferError if it has another size than was written."""
        store, key = self._store, self._place.key
        if self._key != key:
            self._attempt(lambda: store.client.move(self._key, key))
        store.changed(key, self._nbytes)
        info = store.ask(str(self._place), lambda: store.client.info(key))
        nbytes = 0 if info is None else info.nbytes
        if nbytes != self._nbytes:
            raise TransferError(f"{self._place}: has {nbytes:,} bytes, not {self._nbytes:,}")

    def abort(self) -> None:
        """Leave nothing behind: once no part is being sent, discard those sent.

        What could not be discarded is added to ``remains`` of the store.
        """
        self._piece = bytearray()
        self._pieces.fail(_Aborted())
        if self._sent is not None:
            self._sent.exception()
        if self._key != self._place.key:
            with suppress(Exception):
                self._store.client.remove(self._key)

    def _hand_over(self, sent: Future[None]) -> None:
        """Hand over the piece that was filled, once another is wanted."""
        piece, self._piece = self._piece, bytearray()
        if piece and not self._pieces.put(piece):
            self._attempt(sent.result)

    def _attempt(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except NotImplementedError:
            raise TransferError(f"{self._place}: this kind of store cannot be written to") from None
        except CkptoolError as error:
            raise self._failure(error.message, error.hint) from None
        except NoAnswer as error:
            raise self._failure(Problem(error_text(error), error.code), error.hint) from None
        except Exception as error:
            if is_ours(error):
                raise
            raise self._failure(Problem(error_text(error))) from None

    def _failure(self, problem: Problem, hint: str | None = None) -> TransferError:
        head = f"{self._place}: byte {self._done:,} cannot be written"
        return TransferError(problem.within(head), hint=hint)


class _Aborted(OSError):
    """The upload was aborted by its writer."""


class _Pieces:
    """Pieces of a file, handed from the thread that fills them to the one that sends them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._piece: bytearray | None = None
        self._ended = False
        self._error: Exception | None = None

    def put(self, piece: bytearray) -> bool:
        """Hand over a piece once it is asked for; return False if no more are."""
        with self._changed:
            self._changed.wait_for(lambda: self._piece is None or self._ended)
            if self._ended:
                return False
            self._piece = piece
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """End the pieces, for both threads."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End the pieces by an error for the thread that sends them."""
        with self._changed:
            self._error, self._piece = error, None
        self.end()

    def __iter__(self) -> Iterator[bytearray]:
        return self

    def __next__(self) -> bytearray:
        with self._changed:
            self._changed.wait_for(lambda: self._piece is not None or self._ended)
            if self._error is not None:
                raise self._error
            if self._piece is None:
                raise StopIteration
            piece, self._piece = self._piece, None
            self._changed.notify_all()
            return piece
