"""What one process writes of a plan, and which records of the source it checks for that."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from msgspec import Struct, field

from ckptool.core.planning.plan import Plan
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.containers import openings
from ckptool.engine.read.planned import touch
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.share import SourceChunks, checked_chunks, parts_of
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
    """The plan's files of ``numbers`` (layout indices), to be written.

    ``records`` note what is read of records. ``progress`` counts bytes as they are written.
    ``sums``, if the output is to be proved, get the checksum of all that is read.
    """

    plan: Plan
    source: Files
    options: RunOptions
    numbers: Collection[int]
    records: RecordCheck = field(default_factory=RecordCheck)
    progress: Progress = UNWATCHED
    sums: ReadSums | None = None

    def require_records(self, finished: Collection[int]) -> None:
        """Note which records must be read: whole, or in runs that are noted.

        If nothing is shared these are all records that are touched, also by the ``finished`` files,
        which are not written again. What must be opened first is requested at once.
        """
        whole, cut = SourceChunks(), SourceChunks()
        if self.records.is_shared:
            whole, cut = checked_chunks(self.plan, self.numbers)
        else:
            whole += self.plan.chunks(parts_of(self.plan, finished))
        unopened = (opening for _, chunk in (*whole, *cut) for opening in openings(chunk.at))
        edges = [edge for opening in dict.fromkeys(unopened) for edge in opening.edges]
        self.source.expect(edges)
        for entry, chunk in whole:
            touch(self.records, entry, chunk, required=True)
        for entry, chunk in cut:
            touch(self.records, entry, chunk, joined=True)
