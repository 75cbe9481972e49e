"""Archives that differ from one that was found sound in their storages and checksums alone.

A DCP folder has an archive an item, and those of tensors of one shape and type are alike byte for
byte but for these: what was looked at in the one need not be looked at in the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import starmap
from typing import NamedTuple

from ckptool.formats._zip import CRC32_NBYTES, STREAMED, Region, ZipRecord

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
