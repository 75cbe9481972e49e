"""What journals and the notes of a store may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from ckptool.errors import Unsupported
from ckptool.storage.commit_note import Stamp
from ckptool.storage.note import Crc, Size, Text, Time, require_plain

SCHEMA = "ckptool.journal/1"
PartCount = Annotated[int, Meta(ge=0, le=999_999)]
"""As many as --part can name."""

FileMark = tuple[Size, Time, Time]
"""A file of a disk: its bytes, and the times of the last change of its content, and of anything."""
ObjectMark = tuple[Size, Text]
"""A file of a store: its bytes, and its version."""
_Mark = TypeVar("_Mark")


class _Note(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is written as JSON, without what is not set."""


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
        is_within = all(self.offset <= at and at + nbytes <= end for at, nbytes, _ in self.pieces)
        return is_within and end <= files.get(self.file, -1)


class PartEnd(_Note, Generic[_Mark], frozen=True, omit_defaults=False):
    """A finished part: whether it was ``verified``, the state of its ``source``, and its files.

    ``joined`` are the records of which it noted runs, for the process that commits to check.
    """

    verified: bool
    source: Text
    files: dict[str, _Mark]
    joined: list[NotedRecord]

    def __post_init__(self) -> None:
        require_plain(self.files)


class JournalHead(_Note, frozen=True, tag_field="schema", tag=SCHEMA):
    """The first line of a journal: digests of the plan and of the source's files.

    The first process's journal has the files to be written, with their sizes in bytes, and the
    state of the source; those of parts, into how many the run is shared. ``overwrite`` says that
    the run was asked to replace what was at the target then: ``old`` is its inode, ``own`` are the
    files of its checkpoint.
    """

    plan: Text
    source: Text
    parts: PartCount | None = None
    files: dict[str, Size] | None = None
    state: Text | None = None
    overwrite: bool = False
    old: Size | None = None
    own: dict[str, Stamp] = {}

    def __post_init__(self) -> None:
        require_plain([*(self.files or ()), *self.own])


class FinishedFile(_Note, frozen=True):
    """The line of a journal for a file that is ``done``, and the CRC-32 of its bytes."""

    done: str
    crc32: Crc


class FinishedPart(_Note, frozen=True):
    """The last line of the journal of a part that is done."""

    part: PartEnd[FileMark]


class Writer(_Note, frozen=True):
    """The process that writes into a store; no two runs have the same ``token``."""

    host: Text
    process: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    started: Text | None
    begun: Text
    token: Text


class PartNote(_Note, frozen=True, tag_field="schema", tag=SCHEMA):
    """The note of one part in a store: its writer, or its end."""

    plan: Text
    source: Text
    parts: PartCount
    writer: Writer | None = None
    part: PartEnd[ObjectMark] | None = None


class StoreNote(_Note, frozen=True, tag_field="schema", tag=SCHEMA):
    """The note that keeps readers away from the unfinished output in a store.

    ``files`` are those of the run, ``old`` those that it replaces and has not removed yet. A run in
    ``parts`` has no writer until it is committed, and then what each part has ``ended`` with.
    """

    plan: Text
    source: Text
    parts: PartCount = 0
    files: list[str] = []
    writer: Writer | None = None
    old: list[str] = []
    ended: dict[str, PartNote | None] = {}

    def __post_init__(self) -> None:
        require_plain(self.noted)

    @property
    def noted(self) -> list[str]:
        """The files that the run writes, and those that it replaces."""
        return [*self.files, *self.old]

    @property
    def ended_parts(self) -> dict[int, PartNote]:
        """What each part has ended with, by its number."""
        ended = {n: self.ended.get(str(n)) for n in range(self.parts)} if self.ended else {}
        return {number: part for number, part in ended.items() if part is not None}


class RemovalNote(_Note, frozen=True, tag_field="schema", tag="ckptool.removal/1"):
    """The note in a folder of a store from which everything is being removed."""


def require_same_old(
    target: object, head: JournalHead | None, old: int | None, files: Mapping[str, Stamp]
) -> None:
    """Raise Unsupported if something else is at a target now than a run was asked to replace."""
    if head is None or old not in (None, head.old) or not files.items() <= head.own.items():
        raise Unsupported(
            f"{target}: is not the checkpoint that --overwrite was to replace: it came, or changed,"
            " since the run began",
            hint="--overwrite starts over, and replaces what is there now",
        )


def require_same_run(path: object, head: Struct | None, expected: Mapping[str, object]) -> None:
    """Raise Unsupported if a note begins with other digests, or parts, than expected."""
    for what, value in expected.items():
        if getattr(head, what, None) == value:
            continue
        if "parts" not in expected:
            raise Unsupported(
                f"{path}: cannot resume: the {what} has changed since the run began",
                hint="run again without --resume to start over",
            )
        parts = getattr(head, "parts", None)
        begun = f"in {parts} parts" if parts else "without --part"
        why = f"the run began {begun}" if what == "parts" else f"the {what} is another"
        raise Unsupported(
            f"{path}: cannot continue: {why}",
            hint="all parts need the same SRC, options and number of parts; to start over, remove"
            " what the others wrote: this file and those beside it with the same prefix",
        )
