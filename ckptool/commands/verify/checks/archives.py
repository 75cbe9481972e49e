"""The torch.save archives of a checkpoint: their directories, headers, pickles and records.

A DCP folder has an archive per item, and those of tensors of one shape and type are equal byte for
byte except for storages and checksums: what was checked in one is not checked in the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import starmap
from typing import NamedTuple

from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.core.catalog import Container
from ckptool.engine.check.spans import ByteSpan, Packing
from ckptool.errors import CkptoolError, Problem, coded
from ckptool.serialization.archive.read import record_bytes
from ckptool.serialization.archive.siblings import (
    CHECKSUM_OVER_ALL,
    between,
    crc_beside,
    find_sibling,
)
from ckptool.serialization.source import Source
from ckptool.serialization.zip import (
    CRC32_NBYTES,
    DEFLATED,
    Region,
    ZipRecord,
    has_checksums,
    item_region,
    read_directory,
)
from ckptool.serialization.zip_headers import check_headers, count_unclaimed_bytes

_DIGITS = re.compile("[0-9]+")
_EDGE = 1 << 16
_SMALL = 1 << 20
_MOST_INFLATED = 1000
_LEAST_LIMIT = 1 << 26


class ArchiveCheck:
    """Opens archives one after another; ``spans`` are the records whose bytes must still be read.

    ``problems`` are those of the archives' structure. If only this is checked there are no spans.
    """

    def __init__(
        self, source: Source, pickles: PickleAudit, *, only_structure: bool = False
    ) -> None:
        self._source = source
        self._only_structure = only_structure
        self._pickles = pickles
        self._templates = ArchiveTemplates()
        self.problems: list[Problem] = []
        self.spans: list[ByteSpan] = []

    def look_at(self, item: Container) -> bool:
        """Check one archive; return whether its directory could be read."""
        limit = max(_LEAST_LIMIT, _MOST_INFLATED * item.nbytes)
        try:
            with coded("zip-structure", file=item.file):
                region = item_region(self._source, item, "an item", limit, _EDGE)
                is_file = item.nbytes == self._source.files.get(item.file)
                sibling = find_sibling(region) if is_file else None
                if sibling is None:
                    records = self._templates.match(region)
                else:
                    self.problems += _of_another_name(item.file, sibling.root, self._source)
                    records = sibling.own_records(storages=not self._only_structure)
                if records is None:
                    self._look_at_all(item, region, list(read_directory(region).values()))
                else:
                    self._look_into(item, region, records, has_crc=True)
        except CkptoolError as error:
            self.problems += error.problems
            return False
        return True

    def _look_at_all(self, item: Container, region: Region, records: list[ZipRecord]) -> None:
        """Check everything about an archive that matches no earlier one."""
        before = len(self.problems)
        is_file = item.nbytes == self._source.files.get(item.file)
        if is_file and records:
            saved_as = records[0].name.partition("/")[0]
            self.problems += _of_another_name(item.file, saved_as, self._source)
        self.problems += check_headers(region, _with_header_at_hand(region, records))
        if spare := count_unclaimed_bytes(region, records):
            message = f"{region.what}: {spare:,} of its {region.nbytes:,} bytes"
            message += " are not used by any record"
            self.problems.append(Problem(message, "bytes-unused", file=region.file))
        has_crc = has_checksums(records)
        is_plain = self._look_into(item, region, records, has_crc=has_crc)
        if has_crc and is_plain and not is_file and len(self.problems) == before:
            self._templates.add(region, records)

    def _look_into(
        self, item: Container, region: Region, records: list[ZipRecord], *, has_crc: bool
    ) -> bool:
        """Read small records now, return others as spans; return whether pickles are harmless."""
        is_plain = True
        if not self._only_structure:
            storages = [record for record in records if record.is_storage and record.size]
            are_checked = has_checksums(storages)
            self.spans += [_span(item, region, record, are_checked) for record in storages]
        for record in records:
            if record.is_storage:
                continue
            if record.name.endswith(".pkl") or record.size <= _SMALL:
                is_plain &= self._look_at_small(item, region, record, has_crc)
            elif not self._only_structure:
                self.spans.append(_span(item, region, record, has_crc))
        return is_plain

    def _look_at_small(
        self, item: Container, region: Region, record: ZipRecord, has_crc: bool
    ) -> bool:
        """Read everything but storages at once: the pickle, and records such as the byte order."""
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


def _of_another_name(file: str, saved_as: str, source: Source) -> Iterator[Problem]:
    """Yield a problem if the records' names say that a file is that of another rank beside it.

    torch.save names the records of a file after it, up to the last dot (1.6 to 2.13). Only the
    numbers in the names may differ: any other name is a user's choice.
    """
    folder, slash, name = file.rpartition("/")
    stem, dot, ending = name.rpartition(".")
    other = f"{folder}{slash}{saved_as}{dot}{ending}"
    is_alike = _DIGITS.sub("0", saved_as) == _DIGITS.sub("0", stem)
    if saved_as != stem and is_alike and other in source.files:
        message = f"{file}: its records are named like those of {other}: copied or renamed"
        yield Problem(message, "rank-copied", file=file)


def _with_header_at_hand(region: Region, records: Iterable[ZipRecord]) -> Iterator[ZipRecord]:
    """Yield all records; of a decoded item only those near its ends, as the rest is not kept."""
    is_decoded = region.source is None
    for record in records:
        end = record.offset + record.stored + 24
        if not is_decoded or record.header < _EDGE // 2 or region.nbytes - end < _EDGE // 2:
            yield record


def _span(item: Container, region: Region, record: ZipRecord, has_crc: bool) -> ByteSpan:
    what = f"{region.what}: record {record.name!r}"
    crc = record.crc32 if has_crc else None
    if item.transforms:
        packing = Packing(item.file, item.offset, item.nbytes, "zstd")
        return ByteSpan(item.file, record.offset, record.size, crc, what, packing=packing)
    offset = region.offset + record.offset
    if record.method == DEFLATED:
        packing = Packing(item.file, offset, record.stored, "deflate")
        return ByteSpan(item.file, 0, record.size, crc, what, packing=packing)
    return ByteSpan(item.file, offset, record.size, crc, what)


_MOST_SIZES, _MOST_OF_A_SIZE, _MOST_RECORDS = 256, 4, 32


class _Template(NamedTuple):
    """The bytes that all archives of one kind share, and the records that differ.

    Each of these with the places that state its CRC-32.
    """

    spans: tuple[tuple[int, int], ...]
    fixed: bytes
    variable: tuple[tuple[ZipRecord, tuple[int, ...]], ...]


class ArchiveTemplates:
    """Remembers archives with checksums and without problems."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[_Template]] = {}

    def add(self, region: Region, records: Collection[ZipRecord]) -> None:
        """Remember an archive of one tensor, if all but the tensor's bytes is in memory."""
        templates = self._by_size.get(region.nbytes, [])
        is_full = len(self._by_size) >= _MOST_SIZES or len(templates) >= _MOST_OF_A_SIZE
        if is_full or len(records) > _MOST_RECORDS:
            return
        storages = [r for r in records if r.is_storage or r.name.endswith(CHECKSUM_OVER_ALL)]
        variable = tuple((r, (r.noted, crc_beside(region, r))) for r in storages)
        free = [(at, at + CRC32_NBYTES) for _, crc_places in variable for at in crc_places]
        free += [(record.offset, record.offset + record.stored) for record, _ in variable]
        spans = tuple(between(sorted(free), region.nbytes))
        stated = all(region.crc32_at(at) == r.crc32 for r, places in variable for at in places)
        if stated and all(starmap(region.is_at_hand, spans)):
            template = _Template(spans, region.joined(spans), variable)
            self._by_size[region.nbytes] = [*templates, template]

    def match(self, region: Region) -> list[ZipRecord] | None:
        """Return what must still be read of an archive of a known kind, None for any other."""
        for template in self._by_size.get(region.nbytes, ()):
            if region.joined(template.spans) == template.fixed:
                records = [_with_own_crc(region, *variable) for variable in template.variable]
                return None if None in records else [record for record in records if record]
        return None


def _with_own_crc(
    region: Region, record: ZipRecord, crc_places: tuple[int, ...]
) -> ZipRecord | None:
    """Return the record with this archive's CRC-32, None if two places disagree on it."""
    first, *others = (region.crc32_at(at) for at in crc_places)
    return record._replace(crc32=first) if all(other == first for other in others) else None
