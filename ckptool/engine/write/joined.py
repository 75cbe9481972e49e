"""Records of the source of which each part of a run reads a run of bytes, checked at its end.

Nobody reads such a record whole for its CRC-32: each part notes that of the bytes it read, and the
process that commits joins these, and reads what no part has noted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from ckptool.core.catalog import Record
from ckptool.engine.checksum import CrcPiece, RecordCheck, require_intact
from ckptool.errors import Damaged, Problem, Unsupported
from ckptool.storage.local import Files


class NotedRecord(Struct, frozen=True, array_like=True):
    """A record, with the CRC-32 that its writer stored, and the pieces that a part has read."""

    file: str
    offset: int
    nbytes: int
    crc32: int
    tensor: str
    pieces: list[CrcPiece]


class Joining:
    """An output: ``joined`` is what a part reads and does not check, ``noted`` what parts noted."""

    joined: RecordCheck | None = None
    noted: Iterable[object] = ()

    def note_joined(self) -> list[Any]:
        """Return this part's note, as in JSON, of what another process is to join."""
        cut = () if self.joined is None else self.joined.cut()
        records = [NotedRecord(*record, tensor, pieces) for record, tensor, pieces in cut]
        return msgspec.to_builtins(records)  # type: ignore[no-any-return]

    def require_joined(self, source: Files, workers: int) -> None:
        """Check the records that parts noted, and read what is missing; Damaged if one differs.

        Runs of different lengths that overlap are read again, too.
        """
        records = RecordCheck()
        known: dict[tuple[object, ...], int] = {}
        for note in self.noted:
            for each in _read_note(note):
                record = Record(each.file, each.offset, each.nbytes, each.crc32)
                records.touch(record, each.tensor)
                for offset, nbytes, crc in (piece for piece in each.pieces if piece[1]):
                    if known.setdefault((record, offset, nbytes), crc) != crc:
                        raise _differently_read(each, offset, nbytes)
                    records.piece(record, offset, nbytes, crc)
        records.read_unseen(source, workers)
        require_intact(records.problems())


def _read_note(note: object) -> list[NotedRecord]:
    try:
        return msgspec.convert(note, list[NotedRecord])
    except msgspec.ValidationError as error:
        raise Unsupported(
            f"the note of a part is damaged: {error}", hint="run this part again"
        ) from None


def _differently_read(each: NotedRecord, offset: int, nbytes: int) -> Damaged:
    span = f"bytes {offset:,} to {offset + nbytes:,}"
    message = f"{each.file}: two parts read different {span} ({each.tensor})"
    hint = "a disk or memory is faulty: write the parts again elsewhere"
    return Damaged(Problem(message, "crc-mismatch", file=each.file, tensor=each.tensor), hint=hint)
