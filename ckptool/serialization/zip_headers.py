"""What stands beside the records of a zip archive: headers, descriptors, and bytes of nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ckptool.errors import Damaged, Problem
from ckptool.serialization.zip import (
    END,
    END64,
    IN_EXTRA,
    LOCAL,
    LOCATOR64,
    STREAMED,
    Region,
    ZipRecord,
    find_directory,
    find_end,
)

_NARROW, _WIDE = struct.Struct("<3L"), struct.Struct("<L2Q")
"""CRC-32 and bytes, stored and decoded, in a descriptor."""


def count_unclaimed_bytes(region: Region, records: Iterable[ZipRecord]) -> int:
    """Count bytes of the region outside all records, the directory and its end records.

    Descriptors are assumed to be as long as they may be: fewer hidden bytes go unnoticed.
    """
    start, size, _ = find_directory(region)
    end = find_end(region)
    spare, position = 0, 0
    for record in sorted(records, key=lambda record: record.header):
        spare += max(0, record.header - position)
        position = record.offset + record.stored + (24 if record.flags & STREAMED else 0)
    spare += max(0, start - position)
    wide = region.read(end - LOCATOR64.size, 4) == b"PK\x06\x07"
    ends = END64.size + LOCATOR64.size if wide else 0
    comment = int(END.unpack(region.read(end, END.size))[7])
    spare += max(0, end - ends - start - size)
    return spare + max(0, region.nbytes - end - END.size - comment)


def check_headers(region: Region, records: Iterable[ZipRecord]) -> list[Problem]:
    """Return where what stands beside the records contradicts the directory.

    That is a record's local header, and the descriptor behind its bytes where flag bit 3 promises
    one.
    """
    problems = []
    for record in records:
        try:
            reason = _local_problem(region, record) or _descriptor_problem(region, record)
        except Damaged as error:
            reason = error.message
        if reason:
            message = f"{region.what}: record {record.name!r}: {reason}"
            problems.append(Problem(message, "zip-headers", file=region.file))
    return problems


def _local_problem(region: Region, record: ZipRecord) -> str | None:
    fields = LOCAL.unpack(region.read(record.header, LOCAL.size))
    flags, method, noted = fields[2], fields[3], fields[6:9]
    if (flags, method) != (record.flags, record.method):
        return "its local header and the directory differ in method or flags"
    if flags & STREAMED and noted == (0, 0, 0):
        return None
    expected = (record.crc32, record.stored, record.size)
    pairs = zip(noted, expected, strict=True)
    if any(number not in (listed, IN_EXTRA) for number, listed in pairs):
        return f"its local header has {noted} (CRC-32, bytes), the directory {expected}"
    return None


def _descriptor_problem(region: Region, record: ZipRecord) -> str | None:
    if not record.flags & STREAMED:
        return None
    start = record.offset + record.stored
    data = region.read(start, min(24, region.nbytes - start)).removeprefix(b"PK\x07\x08")
    expected = (record.crc32, record.stored, record.size)
    for numbers in (_NARROW, _WIDE):
        if len(data) >= numbers.size and numbers.unpack_from(data) == expected:
            return None
    if data[:12] == _NARROW.pack(*(n & 0xFFFFFFFF for n in expected)):
        return None
    return "its data descriptor and the directory differ in CRC-32 or size"
