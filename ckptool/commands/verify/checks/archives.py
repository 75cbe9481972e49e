"""The torch.save archives of a checkpoint: their directories, headers, pickles and records.

Archives that differ from one that was found sound in their storages and checksums alone.

A DCP folder has an archive an item, and those of tensors of one shape and type are alike byte for
byte but for these: what was looked at in the one need not be looked at in the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import starmap
from typing import NamedTuple

from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.core.catalog import Container
from ckptool.engine.check.spans import Packing, Span
from ckptool.errors import CkptoolError, Problem, coded
from ckptool.serialization.archive.read import record_bytes
from ckptool.serialization.source import Source
from ckptool.serialization.zip import (
    CRC32_NBYTES,
    DEFLATED,
    STREAMED,
    Region,
    ZipRecord,
    has_checksums,
    header_problems,
    item_region,
    read_directory,
    unclaimed_bytes,
)

_DIGITS = re.compile("[0-9]+")
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

    def look_at(self, item: Container) -> bool:
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

    def _look_at_all(self, item: Container, region: Region, records: list[ZipRecord]) -> None:
        """Everything about an archive that is like none before it."""
        before = len(self.problems)
        is_file = item.nbytes == self._source.files.get(item.file)
        self.problems += _of_another_name(item.file, records, self._source) if is_file else []
        self.problems += header_problems(region, _in_reach(region, records))
        self.problems += _unclaimed(region, records)
        has_crc = has_checksums(records)
        is_plain = self._look_into(item, region, records, has_crc=has_crc)
        if has_crc and is_plain and not is_file and len(self.problems) == before:
            self._sound.learn(region, records)

    def _region(self, item: Container) -> Region:
        limit = max(_LEAST_LIMIT, _MOST_INFLATED * item.nbytes)
        return item_region(self._source, item, "an item", limit, _EDGE)

    def _look_into(
        self, item: Container, region: Region, records: list[ZipRecord], *, has_crc: bool
    ) -> bool:
        """Small records now, the others as spans; whether all that pickles name belongs there."""
        is_plain = True
        storages = [record for record in records if record.is_storage and record.size]
        are_checked = has_checksums(storages)
        if not has_crc or (storages and not are_checked):
            self.unchecked.add(item.file)
        self.spans += [_span(item, region, record, are_checked) for record in storages]
        for record in records:
            if record.is_storage:
                continue
            if record.name.endswith(".pkl") or record.size <= _SMALL:
                is_plain &= self._look_at_small(item, region, record, has_crc)
            else:
                self.spans.append(_span(item, region, record, has_crc))
        return is_plain

    def _look_at_small(
        self, item: Container, region: Region, record: ZipRecord, has_crc: bool
    ) -> bool:
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


def _of_another_name(file: str, records: list[ZipRecord], source: Source) -> list[Problem]:
    """A rank's file whose records say that it was saved as another's, which lies beside it.

    torch.save calls the records of a file after it, without what follows the last dot (1.6 to
    2.13). Only the numbers in the names may differ: any other name is a person's choice.
    """
    saved_as = records[0].name.partition("/")[0] if records else ""
    folder, slash, name = file.rpartition("/")
    stem, dot, ending = name.rpartition(".")
    other = f"{folder}{slash}{saved_as}{dot}{ending}"
    is_alike = _DIGITS.sub("0", saved_as) == _DIGITS.sub("0", stem)
    if saved_as == stem or not is_alike or other not in source.files:
        return []
    message = f"{file}: its records are named like those of {other}: copied or renamed"
    return [Problem(message, "rank-copied", file=file)]


def _unclaimed(region: Region, records: Iterable[ZipRecord]) -> list[Problem]:
    spare = unclaimed_bytes(region, records)
    if not spare:
        return []
    message = f"{region.what}: {spare:,} of its {region.nbytes:,} bytes are not used by any record"
    return [Problem(message, "bytes-unused", file=region.file)]


def _in_reach(region: Region, records: Iterable[ZipRecord]) -> Iterator[ZipRecord]:
    """Records whose headers are at hand: all, but in a decoded item those near its ends."""
    is_decoded = region.source.files.get(region.file) == region.nbytes
    for record in records:
        end = record.offset + record.stored + 24
        if not is_decoded or record.header < _EDGE // 2 or region.nbytes - end < _EDGE // 2:
            yield record


def _span(item: Container, region: Region, record: ZipRecord, has_crc: bool) -> Span:
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


_IN_LOCAL_HEADER = 14
_DESCRIPTOR = b"PK\x07\x08"
_MOST_SIZES, _MOST_OF_A_SIZE, _MOST_RECORDS = 256, 4, 32


class _Sound(NamedTuple):
    """The bytes of an archive that are the same in all, and the records that are not.

    Each of these with the places that state its CRC-32.
    """

    spans: tuple[tuple[int, int], ...]
    fixed: bytes
    loose: tuple[tuple[ZipRecord, tuple[int, ...]], ...]


class SoundArchives:
    """Remembers archives that have checksums, and in which nothing is wrong."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Sound]] = {}

    def learn(self, region: Region, records: Collection[ZipRecord]) -> None:
        """Remember an archive of one tensor, where all but its bytes is at hand."""
        alike = self._known.get(region.nbytes, [])
        is_full = len(self._known) >= _MOST_SIZES or len(alike) >= _MOST_OF_A_SIZE
        if is_full or len(records) > _MOST_RECORDS:
            return
        loose = tuple((record, _noted(region, record)) for record in records if _is_loose(record))
        free = [(at, at + CRC32_NBYTES) for _, noted in loose for at in noted]
        free += [(record.offset, record.offset + record.stored) for record, _ in loose]
        spans = tuple(_between(sorted(free), region.nbytes))
        stated = all(region.crc32_at(at) == record.crc32 for record, noted in loose for at in noted)
        if stated and all(starmap(region.is_at_hand, spans)):
            self._known[region.nbytes] = [*alike, _Sound(spans, region.joined(spans), loose)]

    def again(self, region: Region) -> list[ZipRecord] | None:
        """What must still be read of an archive that is alike; None where none is known."""
        for known in self._known.get(region.nbytes, ()):
            if region.joined(known.spans) == known.fixed:
                found = [_as_here(region, *loose) for loose in known.loose]
                return None if None in found else [record for record in found if record]
        return None


def _is_loose(record: ZipRecord) -> bool:
    """Storages, and the checksum over all of them."""
    return record.is_storage or record.name.endswith("/.data/serialization_id")


def _noted(region: Region, record: ZipRecord) -> tuple[int, ...]:
    """Where the CRC-32 of a record is stated: in the directory, and in what stands beside it."""
    if not record.flags & STREAMED:
        return record.noted, record.header + _IN_LOCAL_HEADER
    descriptor = record.offset + record.stored
    is_marked = region.read(descriptor, len(_DESCRIPTOR)) == _DESCRIPTOR
    return record.noted, descriptor + len(_DESCRIPTOR) * is_marked


def _as_here(region: Region, record: ZipRecord, noted: tuple[int, ...]) -> ZipRecord | None:
    """The record with the CRC-32 of this archive, if all places state one."""
    first, *others = (region.crc32_at(at) for at in noted)
    return replace(record, crc32=first) if all(other == first for other in others) else None


def _between(free: Iterable[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """What lies between these spans, which are in order, up to ``nbytes``."""
    position = 0
    for start, end in free:
        if start > position:
            yield position, start
        position = max(position, end)
    if position < nbytes:
        yield position, nbytes
