"""The torch.save archives of a checkpoint: their directories, headers, pickles and records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptool.commands.verify.pickles import PickleAudit
from ckptool.core.catalog import Item
from ckptool.engine.content import Packing, Span
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

    def look_at(self, item: Item) -> bool:
        """Check one archive; whether its directory could be read."""
        try:
            with coded("zip-structure", file=item.file):
                region = self._region(item)
                records = read_directory(region)
        except CkptoolError as error:
            self.problems += error.problems
            return False
        self.problems += header_problems(region, _in_reach(region, records.values()))
        self.problems += _unclaimed(region, records.values())
        has_crc = any(record.crc32 for record in records.values())
        if not has_crc:
            self.unchecked.add(item.file)
        for record in records.values():
            is_small = record.name.endswith(".pkl") or record.size <= _SMALL
            if is_small and "/data/" not in record.name:
                self._look_at_small(item, region, record, has_crc)
            elif record.size:
                self.spans.append(_span(item, region, record, has_crc))
        return True

    def _region(self, item: Item) -> Region:
        limit = max(_LEAST_LIMIT, _MOST_INFLATED * item.nbytes)
        return item_region(self._source, item, "an item", limit, _EDGE)

    def _look_at_small(self, item: Item, region: Region, record: ZipRecord, has_crc: bool) -> None:
        """What is no storage is read at once: the pickle, and notes such as the byte order."""
        try:
            with coded("archive-content", file=item.file):
                data = record_bytes(region, record, has_crc)
        except CkptoolError as error:
            self.problems += error.problems
            return
        if not record.name.endswith(".pkl"):
            return
        stored = record.method != DEFLATED and not item.transforms
        self._pickles.look_at(data, item.file, region.offset + record.offset if stored else None)


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
