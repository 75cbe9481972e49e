"""Codecs that must run over a whole blob before any element in it can be addressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from ckptool.errors import Damaged


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def decode(blob: bytes, codec: str, limit: int, *, what: str) -> bytes:
    """Decode a blob to ``limit`` bytes at most.

    ``codec`` is ``deflate`` (a raw stream, as in zip records) or ``zstd`` (one frame, as DCP's
    ZStandard extension writes). Raises Damaged where the blob is corrupt or decodes to more.
    """
    try:
        if codec == "deflate":
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(blob, limit + 1)
        else:
            data = _unzstd(blob, limit)
    except (zlib.error, ValueError) as error:
        raise _corrupt(f"{what}: the {codec} data is corrupt: {error}") from None
    if len(data) > limit:
        raise _corrupt(f"{what}: the {codec} data decodes to more than {limit:,} bytes")
    return data


def _corrupt(message: str) -> Damaged:
    return Damaged(message, "codec-corrupt")


def zstd_edges(blob: bytes, limit: int, edge: int, *, what: str) -> tuple[bytes, bytes, int]:
    """Return the first and last ``edge`` bytes of a zstd frame, and its decoded size in bytes.

    The rest is decoded and discarded. Raises Damaged where the frame is corrupt or decodes to
    more than ``limit`` bytes.
    """
    import zstandard

    head, tail, size = b"", b"", 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(blob) as stream:
            for piece in _pieces(stream, limit):
                size += len(piece)
                head += piece[: edge - len(head)]
                tail = (tail + piece)[-edge:]
    except zstandard.ZstdError as error:
        raise _corrupt(f"{what}: the zstd data is corrupt: {error}") from None
    if size > limit:
        raise _corrupt(f"{what}: the zstd data decodes to more than {limit:,} bytes")
    return head, tail, size


def _unzstd(blob: bytes, limit: int) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(blob) as stream:
            return b"".join(_pieces(stream, limit))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _pieces(stream: _Readable, limit: int) -> Iterator[bytes]:
    """Read the stream in pieces of at most a MiB, up to one byte more than ``limit``."""
    left = limit + 1
    while left and (piece := stream.read(min(left, 1 << 20))):
        left -= len(piece)
        yield piece
