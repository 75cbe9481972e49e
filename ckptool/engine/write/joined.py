"""Records of the source of which each part of a run reads a run of bytes, checked at its end.

Nobody reads such a record whole for its CRC-32: each part notes that of the bytes it read, and the
process that commits joins these, and reads what no part has noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ckptool.core.catalog import Record
from ckptool.engine.checksum import RecordCheck, require_intact
from ckptool.errors import Damaged, Problem, Unsupported
from ckptool.storage.local import Files
from ckptool.storage.note import Crc, Size, Text


class NotedRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record, with the CRC-32 that its writer stored, and the pieces that a part has read."""

    file: Text
    offset: Size
    nbytes: Size
    crc32: Crc
    tensor: str
    pieces: list[tuple[Size, Size, Crc]]

    def is_in(self, files: Mapping[str, int]) -> bool:
        """Return whether such a record can be in one of some files, with all its pieces."""
        end = self.offset + self.nbytes
        within = all(self.offset <= at and at + nbytes <= end for at, nbytes, _ in self.pieces)
        return within and end <= files.get(self.file, -1)


class Joining:
    """An output: ``joined`` is what a part reads and does not check, ``noted`` what parts noted."""

    joined: RecordCheck | None = None
    noted: Iterable[Sequence[NotedRecord]] = ()

    def note_joined(self) -> list[NotedRecord]:
        """Return this part's note of what another process is to join."""
        cut = () if self.joined is None else self.joined.cut()
        return [NotedRecord(*record, tensor, pieces) for record, tensor, pieces in cut]

    def require_joined(self, source: Files, workers: int) -> None:
        """Check the records that parts noted, and read what is missing; Damaged if one differs.

        Runs of different lengths that overlap are read again, too.
        """
        records = RecordCheck()
        known: dict[tuple[object, ...], int] = {}
        for note in self.noted:
            for each in note:
                if not each.is_in(source.files):
                    raise _no_such_record(each)
                record = Record(each.file, each.offset, each.nbytes, each.crc32)
                records.touch(record, each.tensor)
                for offset, nbytes, crc in (piece for piece in each.pieces if piece[1]):
                    if known.setdefault((record, offset, nbytes), crc) != crc:
                        raise _differently_read(each, offset, nbytes)
                    records.piece(record, offset, nbytes, crc)
        records.read_unseen(source, workers)
        require_intact(records.problems())


def _no_such_record(each: NotedRecord) -> Unsupported:
    return Unsupported(
        f"the note of a part is damaged: {each.file} of the source has no record of {each.nbytes:,}"
        f" bytes at {each.offset:,}",
        hint="run this part again",
    )


def _differently_read(each: NotedRecord, offset: int, nbytes: int) -> Damaged:
    span = f"bytes {offset:,} to {offset + nbytes:,}"
    message = f"{each.file}: two parts read different {span} ({each.tensor})"
    hint = "a disk or memory is faulty: write the parts again elsewhere"
    return Damaged(Problem(message, "crc-mismatch", file=each.file, tensor=each.tensor), hint=hint)
