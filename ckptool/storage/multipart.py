"""A file of a store that is written from its beginning, and appears once it is complete.

Its parts are sent concurrently if the store allows it, else in order.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from ckptool.errors import CkptoolError, NoAnswer, NotFound, Problem, TransferError, error_text
from ckptool.storage.clients.unfinished_uploads import abort_upload
from ckptool.storage.retry import is_ours, retry
from ckptool.storage.store import Store
from ckptool.storage.url import RemotePath

_T = TypeVar("_T")


def memory_of_part(nbytes: int) -> int:
    """Return the bytes of memory for each part of an upload, including the client's copy."""
    return 2 * part_size(nbytes)


def hidden_name(path: str) -> str:
    """Return a file's name until it is complete, for stores that show unfinished files."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.partial"


class Upload:
    """One upload, in parts: ``capacity`` of them fit in memory, including the one being filled.

    A store whose files grow as they are written gets them under a hidden name first.
    """

    def __init__(self, place: RemotePath, nbytes: int, capacity: int = 1) -> None:
        self._place = place
        self._nbytes = nbytes
        self._store = place.store
        self._done = 0
        atomic = self._store.atomic_put
        self._hidden = None if atomic else place.with_name(hidden_name(place.name)).key
        if not atomic:
            self._attempt(lambda: self._store.fs.makedirs(place.parent.key, exist_ok=True))
        key = self._hidden or place.key
        self._parts: PartSender = self._attempt(
            lambda: part_sender(self._store, key, nbytes, capacity)
        )
        self._pool = ThreadPoolExecutor(self._parts.at_once, "ckptool-send")
        self._sending: deque[Future[None]] = deque()
        self._number = 0
        self._part = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes; a full part is sent. Raises TransferError if that, or one before, fails."""
        view = memoryview(data)
        while view:
            piece = view[: self._parts.part - len(self._part)]
            self._part += piece
            self._done += len(piece)
            view = view[len(piece) :]
            if len(self._part) == self._parts.part:
                self._send()

    def finish(self) -> None:
        """Send the rest, and wait until everything has arrived; ``close`` makes the file appear."""
        if self._part:
            self._send()
        self._wait(0)

    def close(self) -> None:
        """Make the file appear; TransferError if it is not what was written."""
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
        """Leave nothing behind: once no part is being sent, discard those sent.

        What could not be discarded is added to ``remains`` of the store.
        """
        self._pool.shutdown(cancel_futures=True)
        self._parts.discard()
        if self._hidden is not None:
            with suppress(Exception):
                self._store.fs.rm_file(self._hidden)

    def _send(self) -> None:
        """Send the part that was filled; as many are sent at once as there is room for."""
        number, data = self._number, self._part
        self._number, self._part = number + 1, bytearray()
        self._sending.append(self._pool.submit(self._parts.put, number, data))
        del data
        self._wait(self._parts.in_memory - 1)

    def _wait(self, most: int) -> None:
        while len(self._sending) > most:
            self._attempt(self._sending.popleft().result)

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


PART = 8 << 20
"""Bytes of one part of an upload; S3 wants 5 MiB at least, and at most 10,000 of them."""
_MOST_PARTS = 9_000
_WIDE = 4


class PartSender(Protocol):
    """Sends parts of ``part`` bytes, the last may be shorter.

    ``at_once`` of them are sent concurrently; ``in_memory`` are kept, including the one being
    filled.
    """

    part: int
    at_once: int
    in_memory: int

    def put(self, number: int, data: bytearray) -> None:
        """Send the part of this number, counted from 0."""

    def complete(self) -> None:
        """Make the file appear, from its parts in order."""

    def discard(self) -> None:
        """Discard what was sent."""


def part_size(nbytes: int) -> int:
    """Return the bytes of each part of a file of ``nbytes``."""
    return max(PART, -(-nbytes // _MOST_PARTS))


def part_sender(store: Store, key: str, nbytes: int, capacity: int) -> PartSender:
    """Return how a file of ``nbytes`` is sent; ``capacity`` parts fit in memory.

    A file of at most one part is sent whole.
    """
    part = part_size(nbytes)
    if nbytes <= part and store.atomic_put and hasattr(store.fs, "_pipe_file"):
        return _WholeSender(store, key, part)
    stream = store.fs.open(key, "wb", block_size=part)
    if nbytes > part and hasattr(stream, "_call_s3"):
        return _MultipartSender(store, stream, nbytes, capacity)
    return _StreamSender(store, key, stream, part, capacity)


class _WholeSender:
    """One request for a file of one part, which can be sent again until it arrives."""

    at_once = in_memory = 1

    def __init__(self, store: Store, key: str, part: int) -> None:
        self._store = store
        self._key = key
        self.part = part
        self._data = b""

    def put(self, number: int, data: bytearray) -> None:
        self._data = bytes(data)

    def complete(self) -> None:
        self._store.put(self._key, self._data, self._store.url(self._key))

    def discard(self) -> None:
        self._data = b""


class _StreamSender:
    """Parts that are written to fsspec's own stream.

    Several are sent at once if there is room: adlfs (2026.8) stages them concurrently, gcsfs
    (2026.10) sends them as one request. Only the stream could retry what fails.
    """

    at_once = 1

    def __init__(self, store: Store, key: str, stream: Any, part: int, capacity: int) -> None:
        self._once = replace(store.policy, attempts=1)
        self._url = store.url(key)
        self._stream = stream
        self.part = part * min(_WIDE, max(1, capacity // 2))
        self.in_memory = min(2, capacity)

    def put(self, number: int, data: bytearray) -> None:
        retry(self._once, self._url, lambda: self._stream.write(data))

    def complete(self) -> None:
        retry(self._once, self._url, self._stream.close)

    def discard(self) -> None:
        with suppress(Exception):
            self._stream.discard()
        with suppress(Exception):
            self._stream.closed = True
        with suppress(Exception):  # huggingface_hub (2.4) keeps unsent data on disk
            Path(self._stream.temp_file.name).unlink()


class _MultipartSender:
    """A multipart upload of s3fs (2024.6 to 2026.9), whose own stream sends one part at a time.

    Each failed request is sent again: a part's number says where it belongs.
    """

    def __init__(self, store: Store, stream: Any, nbytes: int, capacity: int) -> None:
        self._store = store
        self._stream = stream
        self._nbytes = nbytes
        self.part = part_size(nbytes)
        self.in_memory = capacity
        self.at_once = max(1, capacity - 1)
        self._sent: dict[int, dict[str, Any]] = {}
        self._arrived = 0
        stream.loc = nbytes
        store.ask(store.url(stream.path), stream._initiate_upload)
        stream.closed = True  # else it would write its empty buffer when it is freed

    def put(self, number: int, data: bytearray) -> None:
        answer = self._ask(f"part {number + 1}", "upload_part", PartNumber=number + 1, Body=data)
        marks = {name: answer[name] for name in ("ETag", "ChecksumSHA256") if name in answer}
        self._sent[number] = {"PartNumber": number + 1, **marks}
        self._arrived += len(data)

    def complete(self) -> None:
        """Complete the upload; if an answer was lost, check whether that is done."""
        parts = [self._sent[number] for number in sorted(self._sent)]
        try:
            self._ask(
                "the last request", "complete_multipart_upload", MultipartUpload={"Parts": parts}
            )
        except NotFound:
            if not self._is_complete([str(part["ETag"]) for part in parts]):
                raise

    def discard(self) -> None:
        abort_upload(self._store, self._stream.path, self._stream.mpu["UploadId"], self._arrived)

    def _ask(self, what: str, method: str, **named: Any) -> Any:
        stream = self._stream
        upload = {"Bucket": stream.bucket, "Key": stream.key, "UploadId": stream.mpu["UploadId"]}
        return self._store.ask(what, lambda: stream._call_s3(method, **upload, **named))

    def _is_complete(self, etags: list[str]) -> bool:
        """Return whether the object exists and consists of the parts that were sent."""
        stream = self._stream
        found = self._store.ask(
            self._store.url(stream.path),
            lambda: stream._call_s3("head_object", Bucket=stream.bucket, Key=stream.key),
        )
        return (found["ContentLength"], found["ETag"]) == (self._nbytes, _etag_of(etags))


def _etag_of(parts: list[str]) -> str | None:
    """Return S3's ETag of a multipart object, from those of its parts; None if they are not MD5s.

    By the API reference: the MD5 of the parts' MD5s, and their count.
    """
    try:
        digests = b"".join(bytes.fromhex(part.strip('"')) for part in parts)
    except ValueError:
        return None
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
