"""CRC-32: joined from pieces, and of records against what their writer stored."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping

from isal.isal_zlib import crc32 as crc32
from isal.isal_zlib import crc32_combine as crc32_combine

from ckptool.core.catalog import Record
from ckptool.engine.read.byte_reader import ByteSource, byte_job
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import Problem, damaged
from ckptool.storage.files import Files

CrcPiece = tuple[int, int, int]
"""A run of bytes: offset, length, and CRC-32."""


def join_crcs(pieces: list[CrcPiece]) -> int:
    """Return the CRC-32 of adjoining pieces, given in any order."""
    total = 0
    for _, nbytes, crc in sorted(pieces):
        total = crc32_combine(total, crc, nbytes)
    return total


def _join_adjoining(pieces: Mapping[int, tuple[int, int]]) -> list[CrcPiece]:
    """Return the pieces by their offsets, adjoining pieces joined to one."""
    joined: list[CrcPiece] = []
    for offset, (nbytes, crc) in sorted(pieces.items()):
        start, length, total = joined[-1] if joined else (offset, 0, 0)
        if start + length == offset:
            joined[-1:] = [(start, length + nbytes, crc32_combine(total, crc, nbytes))]
        else:
            joined.append((offset, nbytes, crc))
    return joined


def crc_of(tiles: Iterator[memoryview]) -> int:
    """Return the CRC-32 of tiles in order."""
    total = 0
    for data in tiles:
        total = crc32(data, total)
    return total


_MOST_GAPS = 16
"""Gaps of a record that are read one by one; beyond these one read of all of it costs less."""


class RecordCheck:
    """Compares the records in use with the CRC-32 that their writer stored.

    Pieces that are read anyway are noted, unless one is all of a record, and as it was written;
    ``unseen`` names the records that must still be read. If work is ``shared`` these are only the
    ``required`` ones: the rest is compared if it is read completely, or ``joined`` from all notes.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.is_shared = shared
        self._required: set[Record] = set()
        self._joined: set[Record] = set()
        self._lock = threading.Lock()
        self._intact: set[Record] = set()
        self._pieces: dict[Record, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._tensor: dict[Record, str] = {}

    def touch(
        self, record: Record, tensor: str, *, required: bool = False, joined: bool = False
    ) -> None:
        """Note that bytes of this record are needed for this tensor."""
        with self._lock:
            self._tensor.setdefault(record, tensor)
            if required or not self.is_shared:
                self._required.add(record)
            if joined:
                self._joined.add(record)

    def piece(self, record: Record, offset: int, nbytes: int, crc: int) -> None:
        """Note that these bytes of the file, part of the record, have this CRC-32."""
        # all of the record, and as it was written: nothing more is kept of it
        if record == (record.file, offset, nbytes, crc):
            self._intact.add(record)
            return
        with self._lock:
            self._pieces[record].setdefault(offset, (nbytes, crc))

    def note(self, record: Record, offset: int, data: memoryview) -> None:
        """Note these bytes of the file, part of the record, by their CRC-32; once is enough."""
        # without the lock: a note that comes twice at once only costs time
        if record not in self._intact and offset not in self._pieces.get(record, ()):
            self.piece(record, offset, len(data), crc32(data))

    def unseen(self) -> list[Record]:
        """Return the required records whose noted pieces do not cover them exactly."""
        required = (record for record in self._tensor if record in self._required)
        return [record for record in required if not self._is_covered(record)]

    def cut(self) -> Iterator[tuple[Record, str, list[CrcPiece]]]:
        """Yield the records to be joined that are not covered: with a tensor, and noted runs."""
        for record in self._joined - self._required:
            if not self._is_covered(record):
                yield record, self._tensor[record], _join_adjoining(self._pieces[record])

    def problems(self) -> list[Problem]:
        """Return a problem for each record whose bytes are not as written, in the files' order.

        All required records must have been read completely.
        """
        problems: list[Problem] = []
        doubtful = (item for item in self._tensor.items() if item[0] not in self._intact)
        for record, tensor in sorted(doubtful, key=lambda item: (item[0].file, item[0].offset)):
            if not (record in self._required or self._is_covered(record)):
                continue
            pieces = [(o, n, c) for o, (n, c) in self._pieces[record].items()]
            actual = join_crcs(pieces)
            if actual != record.crc32:
                span = f"bytes {record.offset:,} to {record.offset + record.nbytes:,}"
                message = f"{record.file}: {span} ({tensor}) have CRC-32 {actual:08x}, the writer"
                message += f" recorded {record.crc32:08x}"
                problems.append(Problem(message, "crc-mismatch", file=record.file, tensor=tensor))
        return problems

    def read_unseen(self, source: Files, workers: int) -> None:
        """Read the uncovered parts of records; Damaged if a file ends before one does."""
        gaps = (gap for record in self.unseen() for gap in self._gaps(record))
        jobs = (byte_job(gap, gap[0].file, *gap[1:]) for gap in gaps)
        read_tiles(ByteSource(source), jobs, self._note_gap, workers)

    def _gaps(self, record: Record) -> list[tuple[Record, int, int]]:
        """Return the runs of a record that are still to be read; all of it if there are many."""
        gaps, position, end = [], record.offset, record.offset + record.nbytes
        overlaps = False
        for offset, (nbytes, _) in sorted(self._pieces[record].items()):
            overlaps |= offset < position or offset + nbytes > end
            if offset > position:
                gaps.append((record, position, offset - position))
            position = offset + nbytes
        if position < end or not record.nbytes:
            gaps.append((record, position, end - position))
        if overlaps or len(gaps) > _MOST_GAPS:
            self._pieces[record].clear()
            return [(record, record.offset, record.nbytes)]
        return gaps

    def _note_gap(self, gap: tuple[Record, int, int], tiles: Iterator[memoryview]) -> None:
        self.piece(*gap, crc_of(tiles))

    def _is_covered(self, record: Record) -> bool:
        if record in self._intact:
            return True
        joined = _join_adjoining(self._pieces[record]) or [(record.offset, 0, 0)]
        return len(joined) == 1 and joined[0][:2] == (record.offset, record.nbytes)


def require_intact(problems: list[Problem]) -> None:
    """Raise Damaged if records of the source are not as their writer left them."""
    if problems:
        raise damaged(
            problems,
            subject="the source's data",
            hint="the bytes changed after they were written; take another copy of the file",
        )
