"""The torch.save archives of a checkpoint: their directories, headers, pickles and records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptool.commands.verify.pickles import PickleAudit
from ckptool.commands.verify.sound_archives import SoundArchives
from ckptool.core.catalog import Item
from ckptool.engine.spans import Packing, Span
from ckptool.errors import CkptoolError, Problem, coded
from ckptool.formats._archives import item_region
from ckptool.formats._torch_file import record_bytes
from ckptool.formats._zip import (
    DEFLATED,
    Region,
    ZipRecord,
    header_problems,
    read_directory,
    unclaimed_bytes,
)
from ckptool.formats.base import Source

_EDGE = 1 << 16
_SMALL = 1 << 20
_MOST_INFLATED = 1000
_LEAST_LIMIT = 1 << 26


class ArchiveCheck:
    """Opens archives one after another; ``spans`` are the records whose bytes must still be read.

    ``problems`` are what the archives' structure shows.
    """

    def __init__(self, source: Source, pickles: PickleAudit) -> None:
        self._source = source
        self._pickles = pickles
        self.problems: list[Problem] = []
        self.spans: list[Span] = []
        self.unchecked: set[str] = set()
        self._sound = SoundArchives()

    def look_at(self, item: Item) -> bool:
        """Check one archive; whether its directory could be read."""
        try:
            with coded("zip-structure", file=item.file):
                region = self._region(item)
                alike = self._sound.again(region)
                if alike is None:
                    self._look_at_all(item, region, list(read_directory(region).values()))
                else:
                    self._look_into(item, region, alike, has_crc=True)
        except CkptoolError as error:
            self.problems += error.problems
            return False
        return True

    def _look_at_all(self, item: Item, region: Region, records: list[ZipRecord]) -> None:
        """Everything about an archive that is like none before it."""
        before = len(self.problems)
        self.problems += header_problems(region, _in_reach(region, records))
        self.problems += _unclaimed(region, records)
        has_crc = any(record.crc32 for record in records)
        if not has_crc:
            self.unchecked.add(item.file)
        is_plain = self._look_into(item, region, records, has_crc=has_crc)
        if has_crc and is_plain and len(self.problems) == before:
            self._sound.learn(region, records)

    def _region(self, item: Item) -> Region:
        limit = max(_LEAST_LIMIT, _MOST_INFLATED * item.nbytes)
        return item_region(self._source, item, "an item", limit, _EDGE)

    def _look_into(
        self, item: Item, region: Region, records: Iterable[ZipRecord], *, has_crc: bool
    ) -> bool:
        """Small records now, the others as spans; whether all that pickles name belongs there."""
        is_plain = True
        for record in records:
            is_small = record.name.endswith(".pkl") or record.size <= _SMALL
            if is_small and "/data/" not in record.name:
                is_plain &= self._look_at_small(item, region, record, has_crc)
            elif record.size:
                self.spans.append(_span(item, region, record, has_crc))
        return is_plain

    def _look_at_small(self, item: Item, region: Region, record: ZipRecord, has_crc: bool) -> bool:
        """What is no storage is read at once: the pickle, and notes such as the byte order."""
        try:
            with coded("archive-content", file=item.file):
                data = record_bytes(region, record, has_crc)
        except CkptoolError as error:
            self.problems += error.problems
            return False
        if not record.name.endswith(".pkl"):
            return True
        stored = record.method != DEFLATED and not item.transforms
        offset = region.offset + record.offset if stored else None
        return self._pickles.look_at(data, item.file, offset)


def _unclaimed(region: Region, records: Iterable[ZipRecord]) -> list[Problem]:
    spare = unclaimed_bytes(region, records)
    if not spare:
        return []
    message = f"{region.what}: {spare:,} of its {region.nbytes:,} bytes belong to no record"
    return [Problem(message, "bytes-unclaimed", file=region.file)]


def _in_reach(region: Region, records: Iterable[ZipRecord]) -> Iterator[ZipRecord]:
    """Records whose headers are at hand: all, but in a decoded item those near its ends."""
    is_decoded = region.source.files.get(region.file) == region.nbytes
    for record in records:
        end = record.offset + record.stored + 24
        if not is_decoded or record.header < _EDGE // 2 or region.nbytes - end < _EDGE // 2:
            yield record


def _span(item: Item, region: Region, record: ZipRecord, has_crc: bool) -> Span:
    what = f"{region.what}: record {record.name!r}"
    crc = record.crc32 if has_crc else None
    if item.transforms:
        packing = Packing(item.file, item.offset, item.nbytes, "zstd")
        return Span(item.file, record.offset, record.size, crc, what, packing=packing)
    offset = region.offset + record.offset
    if record.method == DEFLATED:
        packing = Packing(item.file, offset, record.stored, "deflate")
        return Span(item.file, 0, record.size, crc, what, packing=packing)
    return Span(item.file, offset, record.size, crc, what)
