"""Archives that are laid out alike: one is read, the others are compared with it.

torch.save stores the CRC-32 of each record in two places, and names the records of a file after the
file (torch 1.6 to 2.13). The archives of items of a DCP folder, or of ranks, that have tensors of
the same sizes differ only in these sums and names, in the storages, and in the pickle if that names
the rank: all other bytes are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain, starmap
from operator import attrgetter, or_
from struct import Struct, calcsize
from typing import NamedTuple

from ckptool.serialization.zip import (
    END64,
    LOCAL,
    LOCATOR64,
    STORED,
    STREAMED,
    Region,
    ZipRecord,
    find_directory,
    find_end,
)
from ckptool.serialization.zip_headers import check_headers, count_unclaimed_bytes

_NAME_IN_ENTRY = 30
"""Bytes from the CRC-32 of a directory's entry to its name."""
_IN_LOCAL_HEADER = 14
_NOT_YET_KNOWN = bytes(12)
"""CRC-32 and sizes in the local header of a record that has a descriptor."""
_DESCRIPTOR = b"PK\x07\x08"
_LEAST_DESCRIPTOR = 16
"""Bytes of a descriptor with its mark."""
_LONGEST_ROOT = 255
"""Characters: its places in all headers are kept."""
_CHECKSUM_OVER_ALL = "/.data/serialization_id"
"""The end of the name of a record that differs whenever a storage does."""
_LARGEST_ALIKE = 1 << 10
"""Bytes of the largest record that is compared: pickles of ranks are larger, of items smaller."""
_MOST_SIZES, _MOST_OF_A_SIZE, _MOST_RECORDS = 256, 8, 1 << 17


class Layout(NamedTuple):
    """All bytes of an archive but the content of its ``own`` records, and which may differ.

    ``common`` are the bytes of ``spans``, as a number, but all ones where others may differ;
    ``free`` has only these ones. ``roots`` takes from the bytes of ``spans`` the root's name in
    each record's name, ``sums`` all CRC-32 of own records, first those beside them and then those
    in the directory.
    """

    records: tuple[ZipRecord, ...]
    own: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    common: int
    free: int
    roots: Struct
    sums: Struct

    def numbers(self) -> dict[str, int]:
        """Return for each storage, by its key, its position among the own records."""
        names = [self.records[at].name.split("/", 2) for at in self.own]
        return {name[2]: at for at, name in enumerate(names) if name[1] == "data" and name[2:]}

    def match(self, region: Region) -> Sibling | None:
        """Return an archive of the same number of bytes that has this layout; else None."""
        if not all(starmap(region.is_at_hand, self.spans)):
            if region.source is None:
                return None
            region.expect((start for start, _ in self.spans), len(self.records))
        found = region.joined(self.spans)
        if _as_number(found) | self.free != self.common:
            return None
        root, *others = {*self.roots.unpack(found)}
        sums, number = self.sums.unpack(found), len(self.own)
        is_whole = not others and sums[:number] == sums[number:] and any(sums)
        if not is_whole or b"/" in root or not root.isascii():
            return None
        return Sibling(self, root.decode(), sums[:number])


class Sibling(NamedTuple):
    """An archive with a known layout: the name of its root, and the CRC-32 of its own records."""

    layout: Layout
    root: str
    crcs: tuple[int, ...]

    @property
    def has_sums(self) -> bool:
        """Whether its writer stored the CRC-32 of storages: without any, all are 0."""
        records = self.layout.records
        pairs = zip(self.layout.own, self.crcs, strict=True)
        return any(crc and records[at].is_storage for at, crc in pairs)

    def own_records(self, *, storages: bool = True) -> list[ZipRecord]:
        """Return the records whose content is not that of every archive with this layout."""
        records = self.layout.records
        return [
            self._as_here(records[at], crc)
            for at, crc in zip(self.layout.own, self.crcs, strict=True)
            if storages or not records[at].is_storage
        ]

    def records(self, *, storages: bool = True) -> dict[str, ZipRecord]:
        """Return all records by name, in the directory's order, or those that are no storages."""
        crcs = dict(zip(self.layout.own, self.crcs, strict=True))
        records = [
            self._as_here(record, crcs.get(at, record.crc32))
            for at, record in enumerate(self.layout.records)
            if storages or not record.is_storage
        ]
        return {record.name: record for record in records}

    def _as_here(self, record: ZipRecord, crc: int) -> ZipRecord:
        name, method, _, *places = record
        return ZipRecord(self.root + name[len(self.root) :], method, crc, *places)


class Layouts:
    """Learns the layouts of some archives, and judges others by them."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Layout]] = {}
        self._kept = 0

    def find(self, region: Region) -> Sibling | None:
        """Return the archive that fills a region, if its layout is known."""
        layouts = self._by_size.get(region.nbytes, [])
        for at, layout in enumerate(layouts):
            sibling = layout.match(region)
            if sibling is not None:
                if at:  # the next archive is like this one, mostly
                    layouts.insert(0, layouts.pop(at))
                return sibling
        return None

    def learn(self, region: Region, records: Collection[ZipRecord]) -> Sibling | None:
        """Remember the layout of an archive, and return it; None if others cannot be judged by it.

        They cannot if any of its headers contradicts its directory, or bytes belong to no record.
        """
        known = self._by_size.get(region.nbytes, [])
        is_full = len(self._by_size) >= _MOST_SIZES or len(known) >= _MOST_OF_A_SIZE
        if is_full or self._kept + len(records) > _MOST_RECORDS:
            return None
        layout = _layout_of(region, tuple(records)) if _is_plain(records) else None
        sibling = layout and layout.match(region)
        if layout and sibling:
            self._kept += len(records)
            self._by_size[region.nbytes] = [*known, layout]
        return sibling


def is_compared(record: ZipRecord) -> bool:
    """Return whether archives of one layout have the same content of a record."""
    is_varied = record.is_storage or record.name.endswith(_CHECKSUM_OVER_ALL)
    return not is_varied and record.size <= _LARGEST_ALIKE


def _layout_of(region: Region, records: tuple[ZipRecord, ...]) -> Layout | None:
    own = tuple(at for at, record in enumerate(records) if not is_compared(record))
    varied = [records[at] for at in own]
    spans = tuple(_between(varied, region.nbytes))
    is_readable = region.source is not None or all(starmap(region.is_at_hand, spans))
    if not is_readable or not _is_sound(region, records):
        return None
    found = region.joined(spans)
    root = records[0].name.partition("/")[0]
    names = sorted(at for record in records for at in _names(record))
    roots = _fields(_places(spans, names), f"{len(root)}s", len(found))
    stated = chain(map(_crc_beside, varied), map(attrgetter("noted"), varied))
    sums = _fields(_places(spans, stated), "L", len(found))
    ones = roots.pack(*[b"\xff" * len(root)] * len(names)), sums.pack(*[0xFFFFFFFF] * 2 * len(own))
    free = reduce(or_, map(_as_number, ones))
    return Layout(records, own, spans, _as_number(found) | free, free, roots, sums)


def _as_number(found: bytes) -> int:
    """Return bytes as one number, which is combined bit by bit without numpy."""
    return int.from_bytes(found, "little")


def _is_plain(records: Collection[ZipRecord]) -> bool:
    """Return whether all records are stored, in the one folder of the pickle."""
    root = next((record.name.partition("/")[0] for record in records), "")
    has_pickle = any(record.name == f"{root}/data.pkl" for record in records)
    is_short = root.isascii() and 0 < len(root) <= _LONGEST_ROOT
    are_inside = all(r.method == STORED and r.name.startswith(f"{root}/") for r in records)
    return has_pickle and is_short and are_inside


def _is_sound(region: Region, records: Collection[ZipRecord]) -> bool:
    """Return whether torch.save may have written all of this: nothing is damaged or overlaps."""
    return (
        _is_in_order(region, records)
        and all(_is_intact(region, record) for record in records)
        and not count_unclaimed_bytes(region, records)
        and not check_headers(region, records)
    )


def _is_in_order(region: Region, records: Iterable[ZipRecord]) -> bool:
    """Return whether nothing that is compared is inside of what is not.

    Headers, records, descriptors, the directory and its three ends must follow one another: a
    header or an end inside of a storage could be another one in the next archive.
    """
    position = 0
    for record in records:
        if record.header < position:
            return False
        has_descriptor = bool(record.flags & STREAMED)
        position = record.offset + record.stored + _LEAST_DESCRIPTOR * has_descriptor
    start, size, _ = find_directory(region)
    behind = start + size
    is_followed = find_end(region) == behind + END64.size + LOCATOR64.size
    locator = region.read(behind + END64.size, LOCATOR64.size) if is_followed else b""
    return position <= start and locator == LOCATOR64.pack(b"PK\x06\x07", 0, behind, 1)


def _is_intact(region: Region, record: ZipRecord) -> bool:
    """Return whether a record that is compared matches its CRC-32.

    Of any other that has a descriptor: whether only this, marked, and no header states the CRC-32.
    """
    if is_compared(record):
        return zlib.crc32(region.read(record.offset, record.stored)) == record.crc32
    if not record.flags & STREAMED:
        return True
    noted = region.read(record.header + _IN_LOCAL_HEADER, len(_NOT_YET_KNOWN))
    mark = region.read(record.offset + record.stored, len(_DESCRIPTOR))
    return (noted, mark) == (_NOT_YET_KNOWN, _DESCRIPTOR)


def _crc_beside(record: ZipRecord) -> int:
    """Return where the CRC-32 of a record is stated beside its bytes."""
    if record.flags & STREAMED:
        return record.offset + record.stored + len(_DESCRIPTOR)
    return record.header + _IN_LOCAL_HEADER


def _names(record: ZipRecord) -> tuple[int, int]:
    """Return where the name of a record begins: in its local header, and in the directory."""
    return record.header + LOCAL.size, record.noted + _NAME_IN_ENTRY


def _between(records: Iterable[ZipRecord], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the gaps between the contents of records, which are in order, up to ``nbytes``."""
    position = 0
    for record in records:
        if record.offset > position:
            yield position, record.offset
        position = max(position, record.offset + record.stored)
    if position < nbytes:
        yield position, nbytes


def _places(spans: Sequence[tuple[int, int]], starts: Iterable[int]) -> Iterator[int]:
    """Yield where bytes of a region, in order, are among those of spans, one after another."""
    ahead, before = iter(spans), 0
    start, end = next(ahead)
    for at in starts:
        while at >= end:
            before += end - start
            start, end = next(ahead)
        yield before + at - start


def _fields(places: Iterable[int], kind: str, nbytes: int) -> Struct:
    """Return what takes the fields of a kind that are at these places, in order, of some bytes."""
    parts, position = ["<"], 0
    for at in places:
        parts.append(f"{at - position}x{kind}")
        position = at + calcsize(f"<{kind}")
    return Struct("".join([*parts, f"{nbytes - position}x"]))
