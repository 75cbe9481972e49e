"""Codecs that must decode a whole blob before any element in it can be addressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptool.errors import Damaged

Bytes = bytes | bytearray


def decode(blob: Bytes, codec: str, limit: int, *, what: str) -> Bytes:
    """Decode a blob to ``limit`` bytes at most.

    ``codec`` is ``deflate`` (a raw stream, as in zip records) or ``zstd`` (one frame, as DCP's
    ZStandard extension writes). Raises Damaged if the blob is corrupt or decodes to more.
    """
    if codec == "zstd":
        decoded = bytearray()
        for piece in _unzstd(blob, limit, what):
            decoded += piece  # joined at the end they would take twice the memory
        return decoded
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(blob, limit + 1)
    except zlib.error as error:
        raise _corrupt(what, codec, f"is corrupt: {error}") from None
    if len(data) > limit:
        raise _corrupt(what, codec, f"decodes to more than {limit:,} bytes")
    return data


def _corrupt(what: str, codec: str, why: str) -> Damaged:
    return Damaged(f"{what}: the {codec} data {why}", "codec-corrupt")


def zstd_edges(blob: bytes, limit: int, edge: int, *, what: str) -> tuple[bytes, bytes, int]:
    """Return the first and last ``edge`` bytes of a zstd frame, and its decoded size in bytes.

    The rest is decoded and discarded. Raises Damaged if the frame is corrupt or decodes to
    more than ``limit`` bytes.
    """
    head, tail, size = b"", b"", 0
    for piece in _unzstd(blob, limit, what):
        size += len(piece)
        head += piece[: edge - len(head)]
        tail = (tail + piece)[-edge:]
    return head, tail, size


def _unzstd(blob: Bytes, limit: int, what: str) -> Iterator[bytes]:
    """Yield the decoded content of a zstd frame in pieces of at most a MiB."""
    import zstandard

    left = limit + 1
    try:
        with zstandard.ZstdDecompressor().stream_reader(blob) as stream:
            while left and (piece := stream.read(min(left, 1 << 20))):
                left -= len(piece)
                yield piece
    except zstandard.ZstdError as error:
        raise _corrupt(what, "zstd", f"is corrupt: {error}") from None
    if not left:
        raise _corrupt(what, "zstd", f"decodes to more than {limit:,} bytes")
