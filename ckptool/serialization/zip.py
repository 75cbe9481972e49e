"""The directory of a zip archive anywhere inside a file, and its contradictions.

torch.save writes zips of stored records, always with a zip64 end record, sizes and CRC-32 only in
the central directory and in descriptors (torch 1.6 to 2.13). Other zips (re-compressed) are legal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import NamedTuple

from ckptool.core.catalog import Container
from ckptool.core.codec import zstd_edges
from ckptool.errors import Damaged, coded
from ckptool.serialization.source import NearReads, edge_spans

STORED, DEFLATED = 0, 8
STREAMED = 8
"""The flag of a record that has a descriptor after its bytes."""
_UNREADABLE = 0x2061
"""The flags of encrypted records, masked headers and patches, which torch does not read."""
IN_EXTRA = 0xFFFFFFFF
"""Means that a size or offset is in the zip64 extra field."""

LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
_ENTRY = b"PK\x01\x02"
CRC32_AT, CRC32_NBYTES = 16, 4
"""Where the CRC-32 is in an entry of the directory."""
_IS_FOLDER = 0x10
"""The attribute of MS-DOS for a folder: miniz, and so torch, reads no byte of such a record."""
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR64 = struct.Struct("<4sLQL")
_LONGEST_COMMENT = 0xFFFF
_SPREAD = 1 << 12
"""Bytes for each header up to which all between the edges is announced."""


class Region:
    """``nbytes`` of a file from ``offset``; small reads near both edges cost no further access.

    A decoded region has no ``reads``: only its first and last bytes, the ``edges``, are available.
    """

    def __init__(
        self,
        reads: NearReads | None,
        file: str,
        offset: int,
        nbytes: int,
        edges: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self.reads, self.file, self.offset, self.nbytes = reads, file, offset, nbytes
        if reads is None:
            self._head, self._tail = edges
        else:
            spans = edge_spans(file, offset, nbytes)
            # beside the edges of a large one is what nobody announced, so a store has to ask for it
            read = reads.read if len(spans) == 1 else reads.source.read
            head, *tail = starmap(read, spans)
            self._head, self._tail = head, b"".join(tail)

    @property
    def what(self) -> str:
        """Return the name of this region in errors."""
        return self.file if self.offset == 0 else f"{self.file} at offset {self.offset:,}"

    def is_at_hand(self, start: int, end: int) -> bool:
        """Return whether reading these bytes costs no further access."""
        return end <= len(self._head) or start >= self.nbytes - len(self._tail)

    def expect(self, starts: Iterable[int], count: int) -> None:
        """Announce that ``count`` local headers are read next, except those in memory.

        If they are near one another, everything between the edges is.
        """
        if self.reads is None:
            return
        source, low, high = self.reads.source, len(self._head), self.nbytes - len(self._tail)
        if high - low <= _SPREAD * count:
            source.expect([(self.file, self.offset + low, high - low)])
            return
        far = (start for start in starts if low <= start < high)
        source.expect((self.file, self.offset + start, LOCAL.size) for start in far)

    def joined(self, spans: Iterable[tuple[int, int]]) -> bytes:
        """Return the bytes from each start to its end, one after another."""
        return b"".join([self.read(start, end - start) for start, end in spans])

    def read(self, start: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from ``start`` bytes into the region; Damaged beyond its end."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise Damaged(
                f"{self.what}: truncated: expected {nbytes:,} bytes at {start:,} of {self.nbytes:,}"
            )
        if start + nbytes <= len(self._head):
            return self._head[start : start + nbytes]
        behind = start - (self.nbytes - len(self._tail))
        if self._tail and behind >= 0:
            return self._tail[behind : behind + nbytes]
        if self.reads is None:
            what = f"{nbytes:,} bytes at {start:,} of an encoded entry"
            raise Damaged(f"{self.file}: {what} are out of range")
        return self.reads.read(self.file, self.offset + start, nbytes)


def item_region(reads: NearReads, item: Container, what: str, limit: int, edge: int) -> Region:
    """Return the bytes of an item as a region of its own, decoded if it is packed.

    Of a packed one, of ``limit`` decoded bytes at most, the first and last ``edge`` are in memory.
    """
    if not item.transforms:
        return Region(reads, item.file, item.offset, item.nbytes)
    packed = reads.source.read(item.file, item.offset, item.nbytes)
    head, tail, size = zstd_edges(packed, limit, edge, what=f"{what} in {item.file}")
    return Region(None, item.file, 0, size, (head, tail))


class ZipRecord(NamedTuple):
    """One record; ``offset`` is where its bytes begin, ``header`` where its local header does.

    All count from the start of the region; ``stored`` and ``size`` are bytes, in the file and once
    decoded. ``noted`` is the offset of the CRC-32 in the directory, 0 if there is no directory.
    """

    name: str
    method: int
    crc32: int
    stored: int
    size: int
    offset: int
    header: int
    flags: int
    noted: int = 0

    @property
    def is_storage(self) -> bool:
        """Return whether torch.save put a storage into it."""
        return "/data/" in self.name or self.name.startswith("data/")


def has_checksums(records: Iterable[ZipRecord]) -> bool:
    """Return whether the CRC-32 of some of these is stored; a 0 is then real, else missing.

    torch stores none at all under ``set_crc32_options(False)``, and none of storages under
    ``skip_data()``, which another program fills (GPUDirect Storage).
    """
    return any(record.crc32 for record in records)


def read_directory(region: Region) -> dict[str, ZipRecord]:
    """Return all records of the archive that fills the region, in the directory's order.

    Raises Damaged if the archive is truncated or its headers contradict one another.
    """
    with coded("zip-structure", file=region.file):
        start, size, count = find_directory(region)
        data = region.read(start, size)
        region.expect(_headers(data), count)
        records: dict[str, ZipRecord] = {}
        position = 0
        for _ in range(count):
            record, position = _central_entry(region, data, start, position)
            if record.name in records:
                raise Damaged(f"{region.what}: duplicate zip record {record.name!r}")
            records[record.name] = record
        if position != len(data):
            raise Damaged(f"{region.what}: the zip directory does not have {count:,} records")
        return records


def _headers(data: bytes) -> Iterator[int]:
    """Yield the offsets of local headers in the directory, as far as it can be read."""
    position = 0
    while data[position : position + 4] == _ENTRY and position + CENTRAL.size <= len(data):
        fields = CENTRAL.unpack_from(data, position)
        yield fields[16]
        position += CENTRAL.size + sum(fields[10:13])


def find_directory(region: Region) -> tuple[int, int, int]:
    """Return offset, size in bytes and number of entries of the central directory."""
    end = find_end(region)
    fields = END.unpack(region.read(end, END.size))
    disks, (count, size, start) = fields[1:3], fields[4:7]
    if end >= LOCATOR64.size:
        locator = region.read(end - LOCATOR64.size, LOCATOR64.size)
        if locator[:4] == b"PK\x06\x07":
            _, _, where, parts = LOCATOR64.unpack(locator)
            end64 = END64.unpack(region.read(where, END64.size))
            if end64[0] != b"PK\x06\x06":
                raise Damaged(f"{region.what}: the zip64 end record is damaged")
            disks, (count, size, start) = (*end64[4:6], parts - 1), end64[7:10]
            _require_same_end(region, fields[3:7], end64[6:10])
    if any(disks):
        raise Damaged(f"{region.what}: a zip on several disks, or one whose end record is damaged")
    if start + size > end or count * CENTRAL.size > size:
        raise Damaged(
            f"{region.what}: the zip directory ({count:,} records, {size:,} bytes at {start:,})"
            f" does not fit before the end record at {end:,}"
        )
    return start, size, count


def _require_same_end(region: Region, narrow: Sequence[int], wide: Sequence[int]) -> None:
    """Raise Damaged if the two end records differ in what the narrow one can represent."""
    limits = (0xFFFF, 0xFFFF, IN_EXTRA, IN_EXTRA)
    for number, wide_number, limit in zip(narrow, wide, limits, strict=True):
        if number not in (wide_number, limit):
            raise Damaged(f"{region.what}: the two end records of the zip disagree")


def find_end(region: Region) -> int:
    """Return the offset of the end record; Damaged if there is none."""
    if region.nbytes >= END.size:
        for length in (END.size, min(region.nbytes, END.size + _LONGEST_COMMENT)):
            tail = region.read(region.nbytes - length, length)
            at = tail.rfind(b"PK\x05\x06")
            if at >= 0 and at + END.size <= length:
                return region.nbytes - length + at
    raise Damaged(
        f"{region.what}: no zip directory at the end of its {region.nbytes:,} bytes;"
        " it is truncated or overwritten"
    )


def _central_entry(region: Region, data: bytes, start: int, position: int) -> tuple[ZipRecord, int]:
    """Return a record, and where the next one's entry begins; the directory begins at ``start``."""
    if position + CENTRAL.size > len(data) or data[position : position + 4] != _ENTRY:
        raise Damaged(f"{region.what}: the zip directory is damaged at byte {position:,}")
    fields = CENTRAL.unpack_from(data, position)
    method, crc, stored, size = fields[4], *fields[7:10]
    name_length, extra_length, comment_length = fields[10:13]
    at = position + CENTRAL.size
    written = data[at : at + name_length]
    name, header = written.decode("utf-8", "replace"), fields[16]
    if IN_EXTRA in (size, stored, header):
        extra = data[at + name_length : at + name_length + extra_length]
        size, stored, header = _zip64(extra, size, stored, header)
    if fields[3] & _UNREADABLE:
        raise Damaged(f"{region.what}: record {name!r} is encrypted, or a patch of another")
    if fields[13]:
        raise Damaged(f"{region.what}: record {name!r} is on disk {fields[13]} of several")
    if method not in (STORED, DEFLATED):
        raise Damaged(f"{region.what}: record {name!r} is compressed with method {method}")
    if fields[15] & _IS_FOLDER and not name.endswith("/"):
        message = f"{region.what}: record {name!r} is marked as a folder; torch reads no byte of it"
        raise Damaged(message)
    offset = _data_offset(region, written, header)
    if offset + stored > region.nbytes or (method == STORED and stored != size):
        raise Damaged(
            f"{region.what}: record {name!r} has {stored:,} bytes at {offset:,}"
            f" of {region.nbytes:,}"
        )
    end = at + name_length + extra_length + comment_length
    noted = start + position + CRC32_AT
    return ZipRecord(name, method, crc, stored, size, offset, header, fields[3], noted), end


def _zip64(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """Replace the 32-bit fields that are all ones by their 64-bit values."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            body = extra[position + 4 : position + 4 + length]
            values = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            size = next(values, size) if size == IN_EXTRA else size
            stored = next(values, stored) if stored == IN_EXTRA else stored
            header = next(values, header) if header == IN_EXTRA else header
        position += 4 + length
    return size, stored, header


def _data_offset(region: Region, written: bytes, header: int) -> int:
    length = min(LOCAL.size + len(written), region.nbytes - header)
    data = region.read(header, max(LOCAL.size, length))
    fields = LOCAL.unpack_from(data)
    if fields[0] != b"PK\x03\x04":
        name = written.decode("utf-8", "replace")
        raise Damaged(f"{region.what}: record {name!r} has no header at byte {header:,}")
    if fields[9] != len(written):
        data = region.read(header, LOCAL.size + fields[9])
    if data[LOCAL.size :] != written:
        name, local = (text.decode("utf-8", "replace") for text in (written, data[LOCAL.size :]))
        if name != local:
            message = f"the directory names a record {name!r}, its header {local!r}"
            raise Damaged(f"{region.what}: {message}")
    return header + LOCAL.size + int(fields[9]) + int(fields[10])
