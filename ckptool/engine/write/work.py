"""What one process writes of a plan, and which records of the source it checks for that."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from msgspec import Struct

from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.core.planning.plan import Plan
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.containers import openings
from ckptool.engine.read.planned import touch
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.share import ALL, CutChunks, Share, checked_chunks, parts_of
from ckptool.storage.files import Files


class RunOptions(Protocol):
    """What a command asks of the engine."""

    @property
    def workers(self) -> int | None:
        """The number of threads; None for what suits the source and the target best."""

    @property
    def budget(self) -> int:
        """Bytes of memory for tiles, source spans and decoded blobs together."""

    @property
    def fsync(self) -> bool:
        """Whether to wait until everything is on disk."""


class Work(Struct, frozen=True):
    """The plan's files of ``numbers`` (layout indices), to be written as a share of all the work.

    ``progress`` counts bytes as they are written. ``sums``, if the output is to be proved,
    get the checksum of all that is read. What a process notes of records for another one to check
    goes into ``joined``.
    """

    plan: Plan
    source: Files
    options: RunOptions
    numbers: Collection[int]
    share: Share = ALL
    progress: Progress = UNWATCHED
    sums: ReadSums | None = None
    joined: RecordCheck | None = None

    def check_records(self, finished: Collection[int]) -> RecordCheck:
        """Return the check that notes what is read of records, with the records that must be read.

        If nothing is shared these are all records that are touched, also by the ``finished`` files,
        which are not written again.
        """
        records = self.joined or RecordCheck(shared=not self.share.is_all)
        if self.share.is_all:
            self._touch(self.plan.chunks(parts_of(self.plan, finished)), records)
            return records
        cut: CutChunks = []
        chunks = checked_chunks(self.plan, self.numbers, None if self.joined is None else cut)
        self._touch(chunks, records)
        self._touch(cut, records, joined=True)
        return records

    def _touch(
        self,
        chunks: Iterable[tuple[TensorEntry, Chunk]],
        records: RecordCheck,
        *,
        joined: bool = False,
    ) -> None:
        """Note that the records of chunks, each with its tensor, must be read, or ``joined``.

        What must be opened first is requested at once.
        """
        chunks = list(chunks)
        unopened = dict.fromkeys(opening for _, chunk in chunks for opening in openings(chunk.at))
        self.source.expect([edge for opening in unopened for edge in opening.edges])
        for entry, chunk in chunks:
            touch(records, entry, chunk, required=not joined, joined=joined)
