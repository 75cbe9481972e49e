"""What stands beside the records of a zip, checked against its directory.

No reader of tensors looks at either.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ckptool.errors import Damaged, Problem
from ckptool.formats._zip import IN_EXTRA, LOCAL, STREAMED, Region, ZipRecord


def header_problems(region: Region, records: Iterable[ZipRecord]) -> list[Problem]:
    """Where what stands beside the records contradicts the directory.

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
    flags, method, crc, stored, size = fields[2], fields[3], fields[6], fields[7], fields[8]
    if (flags, method) != (record.flags, record.method):
        return "its local header states another method or other flags than the directory"
    noted = (crc, stored, size)
    if flags & STREAMED and noted == (0, 0, 0):
        return None
    wanted = (record.crc32, record.stored, record.size)
    pairs = zip(noted, wanted, strict=True)
    if any(one not in (other, IN_EXTRA) for one, other in pairs):
        return f"its local header states {noted} (CRC-32, bytes), the directory {wanted}"
    return None


def _descriptor_problem(region: Region, record: ZipRecord) -> str | None:
    if not record.flags & STREAMED:
        return None
    start = record.offset + record.stored
    data = region.read(start, min(24, region.nbytes - start)).removeprefix(b"PK\x07\x08")
    wanted = (record.crc32, record.stored, record.size)
    if data[:12] == struct.pack("<3L", *(n & 0xFFFFFFFF for n in wanted)):
        return None
    if data[:20] == struct.pack("<L2Q", *wanted):
        return None
    return "the descriptor behind it states another CRC-32 or size than the directory"
