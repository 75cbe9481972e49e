"""What ckptool asks of a store: the port that each client of stores implements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

_PIECE = 1 << 20
"""Bytes that are handed to a client together, which joins them to parts."""


class ObjectInfo(NamedTuple):
    """A file of a store: its size in bytes, and its version (an ETag or a time)."""

    nbytes: int
    version: str
    modified: float


class ObjectVersion(NamedTuple):
    """A file as it was listed: its key, and its version (an ETag or a time; empty if unknown)."""

    key: str
    version: str


class Pieces:
    """The contents of a file as pieces of its own, in order, of about ``_PIECE`` bytes.

    ``sent`` are the bytes of those that were taken, ``error`` is what the contents raised.
    """

    def __init__(self, contents: Iterable[memoryview | bytes]) -> None:
        self._contents = iter(contents)
        self.sent = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytearray]:
        return self

    def __next__(self) -> bytearray:
        piece = bytearray()
        try:
            while len(piece) < _PIECE:
                piece += next(self._contents)
        except StopIteration:
            if not piece:
                raise
        except BaseException as error:
            self.error = error
            raise
        self.sent += len(piece)
        return piece


def hidden_name(path: str) -> str:
    """Return a file's name until it is complete, for stores that show unfinished files."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.partial"


class Client(Protocol):
    """Lists, reads, writes and removes the files of one kind of store, a request for each call.

    Files have keys. A call raises what ``retry`` understands: an OSError, often with the ``status``
    of the answer, 404 if there is no such file.
    """

    atomic_put: bool
    """Whether a file appears only once it is complete."""
    pins: bool
    """Whether a read that names an ETag fails if another version is there."""

    def key(self, url: str) -> str:
        """Return the store's own name for the place of a URL."""

    def url(self, key: str) -> str:
        """Return the URL of a key, with any credentials it has."""

    def find(self, key: str) -> dict[str, ObjectInfo]:
        """Return all files below a place by their keys; one that is there itself, if that shows."""

    def info(self, key: str) -> ObjectInfo | None:
        """Return the store's current information on a file; None if a folder is there.

        Raises Unsupported if the store does not say how large it is.
        """

    def get(self, key: str) -> memoryview:
        """Return all of a small file."""

    def read(self, file: ObjectVersion, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, fewer if the file ends before.

        Raises Changed if another version is there, OSError if other bytes came, and Unsupported if
        the server returns whole files only.
        """

    def put(self, key: str, data: bytes | bytearray) -> None:
        """Make or replace a small file."""

    def upload(self, key: str, pieces: Pieces, upload: Upload) -> None:
        """Make or replace a file from its pieces in order, tried again as far as the client can.

        It appears once it is complete. If that fails, or the pieces raise, what was sent is
        discarded; PartsRemain if that is refused.
        """

    def remove(self, key: str) -> None:
        """Remove a file."""


class Upload(NamedTuple):
    """A file to upload: its bytes, those of each part but the last, and how many parts at once."""

    nbytes: int
    part: int
    at_once: int


class PartsRemain(OSError):
    """A store refused to discard the parts of an unfinished file; ``status`` is its answer's."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status
