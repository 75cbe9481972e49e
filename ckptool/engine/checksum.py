"""CRC-32 of bytes that are seen in pieces, in any order, by several threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from isal.isal_zlib import crc32, crc32_combine

from ckptool.core.catalog import Record
from ckptool.errors import Problem
from ckptool.storage.disk import is_real_file
from ckptool.storage.local import Bytes

__all__ = ["Piece", "RecordCheck", "crc32", "crc32_combine", "file_crc", "joined", "record_crc"]

Piece = tuple[int, int, int]
"""A run of bytes: its offset, how many they are, and their CRC-32."""


def file_crc(path: Path, nbytes: int, buffer: memoryview) -> int | None:
    """The CRC-32 of a file of ``nbytes``, read through ``buffer``; None if it is no such file."""
    if not is_real_file(path) or path.stat().st_size != nbytes:
        return None
    total = 0
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            total = crc32(buffer[:count], total)
    return total


def joined(pieces: list[Piece]) -> int:
    """The CRC-32 of adjoining pieces ``(offset, nbytes, crc32)``, in order of offset."""
    total = 0
    for _, nbytes, crc in sorted(pieces):
        total = crc32_combine(total, crc, nbytes)
    return total


def record_crc(reader: Bytes, record: Record, buffer: memoryview) -> int:
    """The CRC-32 of a whole record, read through ``buffer``."""
    total = 0
    for start in range(0, record.nbytes, len(buffer)):
        piece = buffer[: min(len(buffer), record.nbytes - start)]
        reader.read_into(record.file, record.offset + start, piece)
        total = crc32(piece, total)
    return total


class RecordCheck:
    """Compares the records a transfer touches with the CRC-32 their writer stored.

    Pieces that are read in passing are noted; ``unseen`` names the records that must still be read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[Record, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._tensor: dict[Record, str] = {}

    def touch(self, record: Record, tensor: str) -> None:
        """The transfer needs bytes of this record for this tensor."""
        with self._lock:
            self._tensor.setdefault(record, tensor)

    def piece(self, record: Record, offset: int, nbytes: int, crc: int) -> None:
        """These bytes of the file, part of the record, had this CRC-32."""
        with self._lock:
            self._pieces[record].setdefault(offset, (nbytes, crc))

    def unseen(self) -> list[Record]:
        """Records whose noted pieces do not cover them exactly."""
        return [record for record in self._tensor if not self._covered(record)]

    def problems(self, without: Collection[Record] = ()) -> list[Problem]:
        """One line for each record whose bytes are not those that were written.

        All records that are touched must have been read whole, but for those left out.
        """
        found: list[Problem] = []
        for record, tensor in self._tensor.items():
            if record in without:
                continue
            pieces = [(o, n, c) for o, (n, c) in self._pieces[record].items()]
            actual = joined(pieces)
            if actual != record.crc32:
                span = f"bytes {record.offset:,} to {record.offset + record.nbytes:,}"
                message = f"{record.file}: {span} ({tensor}) have CRC-32 {actual:08x}, the writer"
                message += f" recorded {record.crc32:08x}"
                found.append(Problem(message, "crc-mismatch", file=record.file, tensor=tensor))
        return found

    def whole(self, record: Record, crc: int) -> None:
        """The whole record was read and had this CRC-32."""
        with self._lock:
            self._pieces[record] = {record.offset: (record.nbytes, crc)}

    def _covered(self, record: Record) -> bool:
        position = record.offset
        for offset, (nbytes, _) in sorted(self._pieces[record].items()):
            if offset != position:
                return False
            position += nbytes
        return position == record.offset + record.nbytes
