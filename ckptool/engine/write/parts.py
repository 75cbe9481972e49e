"""Output made by several processes, parts or ranks: what the notes of all say together.

A part's note is its journal on a disk, and an object in a store. It has the number of parts, and
once the part is done the files it wrote, as they were then, and what it read of records of the
source that no part reads whole. Nobody reads such a record for its CRC-32: whoever commits joins
those of the bytes that the parts or ranks read, and reads what none has noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptool.core.catalog import Record
from ckptool.core.text import list_some
from ckptool.engine.checksum import RecordCheck, require_intact
from ckptool.engine.write.schemas import (
    JournalHead,
    NotedRecord,
    PartEnd,
    PartNote,
    require_same_run,
)
from ckptool.errors import Damaged, Problem, Unsupported
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.engine.write.stage import StageOptions


class PartState(Struct, frozen=True):
    """How the note of a part begins, and its end once the part is done."""

    head: JournalHead | PartNote
    end: PartEnd[Any] | None


def run_head(options: StageOptions, parts: int) -> dict[str, object]:
    """Return the common beginning of the notes of all parts of one run."""
    return {"plan": options.plan, "source": options.source, "parts": parts}


def unfinished_parts(target: object, count: int) -> Unsupported:
    """Return the error for a run, not in parts, that would remove the output of parts."""
    return Unsupported(
        f"{target}: holds the unfinished output of a run in {count} parts",
        hint="--part K/N continues each, --finish ends it, and --overwrite starts over",
    )


def require_parts(
    target: object,
    parts: Mapping[int, PartState],
    options: StageOptions,
    written: Iterable[str],
) -> list[PartEnd[Any]]:
    """Return the end of each part.

    ``parts`` are by the part's number from 0 on, ``written`` the files that they must have written
    together. Raises Unsupported if they are of another run, or one is not done.
    """
    if not parts:
        raise Unsupported(
            f"{target}: no parts found", hint="first run each with --part K/N, K from 1 to N"
        )
    count = next(iter(parts.values())).head.parts or 0
    for number, part in parts.items():
        what = f"part {number + 1} of {target}"
        require_same_run(what, part.head, run_head(options, count or -1))
    ends = {number: part.end for number, part in parts.items() if part.end is not None}
    _require_none(target, [n + 1 for n in range(count) if n not in ends], count, "not done")
    ended = [ends[number] for number in range(count)]
    if options.verify:
        wrong = [n for n, end in enumerate(ended, 1) if not end.verified]
        _require_none(target, wrong, count, "not verified", or_else=", or give --no-verify")
    wrong = [n for n, end in enumerate(ended, 1) if end.source != options.source_state]
    _require_none(target, wrong, count, "of a source that was written to, or touched, since")
    strays = {name for end in ended for name in end.files} ^ set(written)
    if strays or len(parts) > count:
        text = list_some(sorted(strays)) if strays else f"{len(parts):,} parts"
        raise Unsupported(
            f"{target}: {text}: not what {count} parts of this run write",
            hint="write it again elsewhere",
        )
    return ended


def _require_none(
    target: object, numbers: Sequence[int], count: int, why: str, or_else: str = ""
) -> None:
    if numbers:
        what = f"part {numbers[0]}" if len(numbers) == 1 else f"{len(numbers):,} parts"
        names = "" if len(numbers) == 1 else f": {list_some(list(map(str, numbers)), 8)}"
        verb = "is" if len(numbers) == 1 else "are"
        raise Unsupported(
            f"{target}: {what} of {count} {verb} {why}{names}",
            hint=f"the same command with --part {numbers[0]}/{count} in place of --finish{or_else}",
        )


def damaged_part(target: object, number: int, count: int, files: Sequence[str]) -> Unsupported:
    """Return the error for a part whose files are not as it left them."""
    return Unsupported(
        f"{target}: {list_some(files)} of part {number + 1} of {count}: missing, or changed since",
        hint=f"the same command with --part {number + 1}/{count} in place of --finish writes what"
        " is not as it was",
    )


def note_cut(check: RecordCheck) -> list[NotedRecord]:
    """Return a part's or rank's note of what another process is to join, from what it read."""
    return [NotedRecord(*record, tensor, pieces) for record, tensor, pieces in check.cut()]


def require_joined(notes: Iterable[NotedRecord], source: Files, workers: int) -> None:
    """Check records that parts or ranks noted, and read what is missing; Damaged if one differs.

    Runs of different lengths that overlap are read again, too.
    """
    records = RecordCheck()
    crcs: dict[tuple[object, ...], int] = {}
    for note in notes:
        if not note.is_in(source.files):
            raise _no_such_record(note)
        record = Record(note.file, note.offset, note.nbytes, note.crc32)
        records.touch(record, note.tensor)
        for offset, nbytes, crc in (piece for piece in note.pieces if piece[1]):
            if crcs.setdefault((record, offset, nbytes), crc) != crc:
                raise _differently_read(note, offset, nbytes)
            records.piece(record, offset, nbytes, crc)
    records.read_unseen(source, workers)
    require_intact(records.problems())


def _no_such_record(note: NotedRecord) -> Unsupported:
    return Unsupported(
        f"the note of a part is damaged: {note.file} of the source has no record of {note.nbytes:,}"
        f" bytes at {note.offset:,}",
        hint="run this part again",
    )


def _differently_read(note: NotedRecord, offset: int, nbytes: int) -> Damaged:
    span = f"bytes {offset:,} to {offset + nbytes:,}"
    message = f"{note.file}: two processes read different {span} ({note.tensor})"
    hint = "a disk or memory is faulty: write the parts again elsewhere"
    return Damaged(Problem(message, "crc-mismatch", file=note.file, tensor=note.tensor), hint=hint)
