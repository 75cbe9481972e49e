"""Write a file of a store from its beginning; it appears once it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckptool.errors import CkptoolError, NoAnswer, Problem, TransferError, error_text
from ckptool.storage.clients.client import Pieces, Upload
from ckptool.storage.url import RemotePath

PART = 8 << 20
"""Bytes of one part of an upload; S3 wants 5 MiB at least, and at most 10,000 of them."""
_MOST_PARTS = 9_000


def part_size(nbytes: int) -> int:
    """Return the bytes of each part of a file of ``nbytes``."""
    return max(PART, -(-nbytes // _MOST_PARTS))


def memory_of_part(nbytes: int) -> int:
    """Return the bytes of memory for each part of an upload, including the client's copy.

    Half a part is added for what was handed over and is not cut into parts yet, as measured.
    """
    return 5 * part_size(nbytes) // 2


def upload(
    place: RemotePath, nbytes: int, contents: Iterable[memoryview | bytes], capacity: int = 1
) -> None:
    """Write a file of ``nbytes``, in parts: ``capacity`` of them, with the one being filled, fit.

    A file of one part is sent whole. Whatever its ``contents`` raise is raised, and nothing of the
    file is left, but for what ``remains`` of the store. Raises TransferError if it cannot be
    written, or is not what was written.
    """
    store, part, pieces = place.store, part_size(nbytes), Pieces(contents)
    with _naming(place, pieces):
        if nbytes > part or not store.atomic_put:
            store.upload(place.key, pieces, Upload(nbytes, part, max(1, capacity - 1)))
        else:
            store.put(place.key, b"".join(pieces), str(place))
        store.changed(place.key, nbytes)
        info = store.ask(str(place), lambda: store.client.info(place.key))
    sent = 0 if info is None else info.nbytes
    if sent != nbytes:
        raise TransferError(f"{place}: has {sent:,} bytes, not {nbytes:,}")


@contextmanager
def _naming(place: RemotePath, pieces: Pieces) -> Iterator[None]:
    """Name the place, and the byte, in the error of a store; that of the pieces stays."""
    try:
        yield
    except (CkptoolError, NoAnswer) as error:
        if pieces.error is not None:
            raise pieces.error from None
        problem = (
            error.message
            if isinstance(error, CkptoolError)
            else Problem(error_text(error), error.code)
        )
        head = f"{place}: byte {pieces.sent:,} cannot be written"
        raise TransferError(problem.within(head), hint=error.hint) from None
