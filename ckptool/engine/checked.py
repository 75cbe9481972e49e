"""Reads of a source's tensors that check every record they touch on the way."""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.core.catalog import Extent, Record, TensorEntry, places
from ckptool.engine.checksum import RecordCheck, crc32
from ckptool.engine.gather import Gatherer
from ckptool.engine.sources import Files
from ckptool.engine.threads import share_jobs
from ckptool.errors import Problem


class CheckedReads:
    """Makes the gatherers of one pass over a source, and knows the checksums of what they read."""

    def __init__(self, source: Files) -> None:
        self.source = source
        self._records = RecordCheck()

    def gatherer(self) -> Gatherer:
        """A gatherer for one thread."""
        return Gatherer(self.source, self._note)

    def problems(self, entries: Iterable[TensorEntry], workers: int) -> list[Problem]:
        """A problem for each record of these tensors that is not as it was written.

        Records of copies, and others that no gatherer has read whole, are read here. Raises
        Damaged where a file ends before a record does.
        """
        self._touch(entries)
        share_jobs(iter(self._records.unseen()), workers, self.gatherer, self._read)
        return self._records.problems()

    def problems_so_far(self, entries: Iterable[TensorEntry]) -> list[Problem]:
        """As ``problems``, of the records that gatherers have read whole; nothing is read."""
        self._touch(entries)
        return self._records.problems(without=set(self._records.unseen()))

    def _touch(self, entries: Iterable[TensorEntry]) -> None:
        for entry in entries:
            for place in places(entry):
                if isinstance(place, Extent) and place.record is not None:
                    self._records.touch(place.record, entry.name)

    def _note(self, record: Record, offset: int, data: memoryview) -> None:
        self._records.piece(record, offset, len(data), crc32(data))

    def _read(self, gatherer: Gatherer, record: Record) -> None:
        self._records.whole(record, gatherer.crc(record))
