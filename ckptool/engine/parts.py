"""How the parts of a file reach a store: side by side where it takes them so, else in order."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ckptool.engine.store import Store

PART = 8 << 20
"""Bytes of one part of an upload; S3 wants 5 MiB at least, and at most 10,000 of them."""
_MOST_PARTS = 9_000
_WIDE = 4


class Parts(Protocol):
    """Sends parts of ``part`` bytes, the last may be shorter.

    ``together`` of them at once; ``held`` in memory, with that which is filled.
    """

    part: int
    together: int
    held: int

    def put(self, number: int, data: bytearray) -> None:
        """Send the part of this number, counted from 0."""

    def complete(self) -> None:
        """Make the file appear, of its parts in order."""

    def discard(self) -> None:
        """Throw away what was sent."""


def part_of(nbytes: int) -> int:
    """Bytes of each part of a file of ``nbytes``."""
    return max(PART, -(-nbytes // _MOST_PARTS))


def parts_of(store: Store, key: str, nbytes: int, room: int) -> Parts:
    """How a file of ``nbytes`` is sent; there is room for so many parts in memory.

    A file of no more than one part is sent whole.
    """
    part = part_of(nbytes)
    stream = store.fs.open(key, "wb", block_size=part)
    if nbytes > part and hasattr(stream, "_call_s3"):
        return _S3Parts(store, stream, nbytes, room)
    return _InOrder(stream, part, room)


class _InOrder:
    """Parts that are written to fsspec's own stream.

    Several go at once where there is room: adlfs (2026.8) stages them side by side, gcsfs (2026.10)
    sends them as one request.
    """

    together = 1

    def __init__(self, stream: Any, part: int, room: int) -> None:
        self._stream = stream
        self.part = part * min(_WIDE, max(1, room // 2))
        self.held = min(2, room)

    def put(self, number: int, data: bytearray) -> None:
        self._stream.write(data)

    def complete(self) -> None:
        self._stream.close()

    def discard(self) -> None:
        with suppress(Exception):
            self._stream.discard()
        with suppress(Exception):
            self._stream.closed = True
        with suppress(Exception):  # huggingface_hub (2.4) keeps on disk what it has not sent
            Path(self._stream.temp_file.name).unlink()


class _S3Parts:
    """A multipart upload of s3fs (2024.6 to 2026.9), whose own stream sends one part at a time.

    A part that fails is sent again: its number says where it belongs.
    """

    def __init__(self, store: Store, stream: Any, nbytes: int, room: int) -> None:
        self._store = store
        self._stream = stream
        self.part = part_of(nbytes)
        self.held = room
        self.together = max(1, room - 1)
        self._sent: dict[int, dict[str, Any]] = {}
        stream.loc = nbytes
        stream._initiate_upload()
        stream.closed = True  # else it would write what it holds, nothing, when it is forgotten

    def put(self, number: int, data: bytearray) -> None:
        answer = self._store.ask(f"part {number + 1}", lambda: self._answer(number + 1, data))
        told = {name: answer[name] for name in ("ETag", "ChecksumSHA256") if name in answer}
        self._sent[number] = {"PartNumber": number + 1, **told}

    def _answer(self, number: int, data: bytearray) -> Any:
        stream = self._stream
        return stream._call_s3(
            "upload_part",
            Bucket=stream.bucket,
            Key=stream.key,
            PartNumber=number,
            UploadId=stream.mpu["UploadId"],
            Body=data,
        )

    def complete(self) -> None:
        self._stream.parts = [self._sent[number] for number in sorted(self._sent)]
        self._stream.commit()

    def discard(self) -> None:
        with suppress(Exception):
            self._stream.discard()
