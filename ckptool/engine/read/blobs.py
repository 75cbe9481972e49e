"""Decode what is stored in packed blobs, each of them once while it is read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from ckptool.core.catalog import EncodedBlob, TensorEntry
from ckptool.core.codec import Bytes, decode
from ckptool.errors import Damaged
from ckptool.storage.files import FileReader


class Blobs:
    """Decodes blobs for one thread, and keeps the last one of each tensor that is read by turns.

    Unless several are, only the last one of all is kept.
    """

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._by_turns: frozenset[int] = frozenset()
        self._kept: dict[int, tuple[EncodedBlob, Bytes]] = {}

    def read_by_turns(self, entries: Iterable[TensorEntry]) -> None:
        """Keep a blob of each of some tensors from now on, and none of others."""
        self._by_turns = frozenset(map(id, entries))
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._by_turns}

    def decoded(self, at: EncodedBlob, entry: TensorEntry | None) -> Bytes:
        """Return the decoded bytes of a blob of a tensor; Damaged if they are not what they were.

        What would take their place is forgotten before they are read.
        """
        key = id(entry)
        if key not in self._kept or self._kept[key][0] != at:
            kept = self._kept if key in self._by_turns else {}
            self._kept = {other: each for other, each in kept.items() if other != key}
            self._kept[key] = at, self._decode(at)
        return self._kept[key][1]

    def _decode(self, at: EncodedBlob) -> Bytes:
        stored = bytearray(at.nbytes)
        self._reader.read_into(at.file, at.offset, memoryview(stored))
        what = f"{at.file} at byte {at.offset:,}"
        blob = decode(stored, at.codec, at.size, what=what)
        if len(blob) != at.size:
            raise Damaged(f"{what}: decodes to {len(blob):,} bytes, not {at.size:,}")
        _require_crc(at, blob, what)
        return blob


def _require_crc(at: EncodedBlob, blob: Bytes, what: str) -> None:
    """Raise Damaged if a decoded blob does not match its writer's checksum."""
    record = at.record
    if record is None:
        return
    crc = zlib.crc32(memoryview(blob)[record.offset : record.offset + record.nbytes])
    if crc != record.crc32:
        message = f"{what}: decodes to bytes of CRC-32 {crc:08x}, recorded {record.crc32:08x}"
        raise Damaged(message, "crc-mismatch", file=at.file)
