"""The torch.save archives of a checkpoint: their directories, headers, pickles and records.

A DCP folder has an archive per item, and those of tensors of one shape and type are equal byte for
byte except for storages and checksums: what was checked in one is not checked in the next.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.core.catalog import Container
from ckptool.engine.check.spans import ByteSpan, Packing
from ckptool.errors import CkptoolError, Problem, coded
from ckptool.serialization.archive.read import record_bytes
from ckptool.serialization.archive.templates import Templates, is_compared
from ckptool.serialization.source import NearReads, Source
from ckptool.serialization.zip import (
    DEFLATED,
    Region,
    ZipRecord,
    has_checksums,
    item_region,
    read_directory,
)
from ckptool.serialization.zip_headers import check_headers, count_unclaimed_bytes

_DIGITS = re.compile("[0-9]+")
_VERSION_NAMES = (".data/version", "version")
"""The records of which torch.load reads the first that there is, in torch's own order."""
_VERSION = re.compile(rb"\s*\+?([0-9]+)")
_VERSIONS = range(1, 11)
"""What torch 1.6 to 2.13 read; they write 3 or, with .data/version, more."""
_LONGEST_VERSION = 20
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
        self._source, self._reads = source, NearReads(source)
        self._only_structure = only_structure
        self._pickles = pickles
        self._templates = Templates()
        self._files_of_size = Counter(source.files.values())
        self.problems: list[Problem] = []
        self.spans: list[ByteSpan] = []

    def look_at(self, item: Container) -> bool:
        """Check one archive; return whether its directory could be read."""
        limit = max(_LEAST_LIMIT, _MOST_INFLATED * item.nbytes)
        try:
            with coded("zip-structure", file=item.file):
                region = item_region(self._reads, item, "an item", limit, _EDGE)
                sibling = self._templates.find(region)
                if sibling is None:
                    self._look_at_all(item, region, list(read_directory(region).values()))
                else:
                    self._note_name(item, sibling.root)
                    records = sibling.own_records(storages=not self._only_structure)
                    self._look_into(item, region, records, has_crc=True)
        except CkptoolError as error:
            self.problems += error.problems
            return False
        return True

    def _look_at_all(self, item: Container, region: Region, records: list[ZipRecord]) -> None:
        """Check everything about an archive that matches no earlier one."""
        if records:
            self._note_name(item, records[0].name.partition("/")[0])
        count = len(self.problems)
        if not _are_in_one_folder([record.name for record in records]):
            message = f"{region.what}: its records are not all in one folder, beside data.pkl"
            self.problems.append(Problem(message, "archive-flat", file=region.file))
        elif reason := _version_reason(region, records):
            message = f"{region.what}: {reason}: torch.load refuses it"
            self.problems.append(Problem(message, "archive-content", file=region.file))
        self.problems += check_headers(region, _with_header_at_hand(region, records))
        if spare := count_unclaimed_bytes(region, records):
            message = f"{region.what}: {spare:,} of its {region.nbytes:,} bytes"
            message += " are not used by any record"
            self.problems.append(Problem(message, "bytes-unused", file=region.file))
        has_crc = has_checksums(records)
        is_plain = self._look_into(item, region, records, has_crc=has_crc)
        # what is learned of a file by itself serves only another file of its size
        may_follow = not self._is_file(item) or self._files_of_size[item.nbytes] > 1
        if has_crc and is_plain and may_follow and len(self.problems) == count:
            self._templates.learn(region, records)

    def _is_file(self, item: Container) -> bool:
        return item.nbytes == self._source.files.get(item.file)

    def _note_name(self, item: Container, saved_as: str) -> None:
        if self._is_file(item):
            self.problems += _check_name(item.file, saved_as, self._source)

    def _look_into(
        self, item: Container, region: Region, records: list[ZipRecord], *, has_crc: bool
    ) -> bool:
        """Read small records now, and add spans for the others.

        Return whether the pickles are harmless that later archives of this layout need not repeat.
        """
        is_plain = True
        if not self._only_structure:
            storages = [record for record in records if record.is_storage and record.size]
            are_checked = has_checksums(storages)
            self.spans += [_span(item, region, record, are_checked) for record in storages]
        for record in records:
            if record.is_storage:
                continue
            if record.name.endswith(".pkl") or record.size <= _SMALL:
                is_harmless = self._look_at_small(item, region, record, has_crc)
                is_plain &= is_harmless or not is_compared(record)
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


def _are_in_one_folder(names: Sequence[str]) -> bool:
    """Return whether records are where torch.load finds them: in the folder of the first one."""
    folder = names[0].partition("/")[0] + "/" if names else ""
    return f"{folder}data.pkl" in names and all(name.startswith(folder) for name in names)


def _version_reason(region: Region, records: Sequence[ZipRecord]) -> str | None:
    """Return what is wrong with the version of the archive's layout that torch.load reads first."""
    records_by_name = {record.name.partition("/")[2]: record for record in records}
    record = next(filter(None, map(records_by_name.get, _VERSION_NAMES)), None)
    if record is None:
        return "it has no record 'version'"
    text = record_bytes(region, record, has_crc=False)[:_LONGEST_VERSION]
    number = _VERSION.match(text)
    if number is None or int(number[1]) not in _VERSIONS:
        return f"its version is {text.decode('ascii', 'replace')!r}, not one of 1 to 10"
    return None


def _check_name(file: str, saved_as: str, source: Source) -> Iterator[Problem]:
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


def _with_header_at_hand(region: Region, records: list[ZipRecord]) -> list[ZipRecord]:
    """Return all records; of a decoded item only those near its ends, as the rest is not kept."""
    if region.reads is not None:
        return records
    half, end = _EDGE // 2, region.nbytes - 24
    return [r for r in records if r.header < half or end - r.offset - r.stored < half]


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
