"""Archives that are alike: one is read, the others are compared with it.

torch.save stores the CRC-32 of each record in two places, and names the records of a file after the
file (torch 1.6 to 2.13). The archives of items of a DCP folder, or of ranks, that have tensors of
the same sizes differ only in these sums and names, in the storages, and in the pickle if that names
the rank: all other bytes are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from struct import Struct as Form
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from ckptool.serialization.source import edge_spans
from ckptool.serialization.zip import (
    CRC32_NBYTES,
    END64,
    LOCAL,
    LOCATOR64,
    STORED,
    STREAMED,
    Region,
    ZipRecord,
    find_directory,
    find_end,
    has_checksums,
)
from ckptool.serialization.zip_headers import check_headers, count_unclaimed_bytes

if TYPE_CHECKING:
    from ckptool.serialization.archive.read import TorchFile

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
_STORAGES = "data/"
"""The folder of the storages in the root."""
_LARGEST_ALIKE = 1 << 10
"""Bytes of the largest record that is compared: pickles of ranks are larger, of items smaller."""
_MOST_SIZES, _MOST_OF_A_SIZE, _MOST_RECORDS = 256, 8, 1 << 17
"""What is kept: each archive is compared with all of its size, and a folder may have any number."""

_Spans = tuple[tuple[int, int], ...]
Values = tuple[tuple[Any, ...], ...]


class Hole(NamedTuple):
    """Bytes that may differ between similar ones, and what they are: a letter of ``struct``."""

    at: int
    nbytes: int
    kind: str


class Template(Struct, frozen=True):
    """Bytes with typed holes: those that similar bytes have in common, and how to take the others.

    ``fixed`` takes the ``common`` bytes, each of ``holes`` the values in a group of holes; bytes
    that none of them takes are not compared.
    """

    fixed: Form
    common: tuple[bytes, ...]
    holes: tuple[Form, ...]

    @classmethod
    def of(
        cls, data: bytes, compared: Iterable[tuple[int, int]], *groups: Sequence[Hole]
    ) -> Template:
        """Return a template of bytes, of which spans are ``compared`` except for groups of holes.

        Spans and the holes of each group are in order.
        """
        holes = sorted(hole for group in groups for hole in group)
        fixed = _form(_outside(compared, holes), len(data))
        return cls(fixed, fixed.unpack(data), tuple(_form(group, len(data)) for group in groups))

    def match(self, data: bytes) -> Values | None:
        """Return the values in each group of holes of other bytes; None if these do not match."""
        if len(data) != self.fixed.size or self.fixed.unpack(data) != self.common:
            return None
        return tuple([form.unpack(data) for form in self.holes])

    def match_each(self, data: bytes | bytearray) -> Iterator[Values | None]:
        """Yield what ``match`` returns for each stretch of so many bytes."""
        rows = zip(*(form.iter_unpack(data) for form in self.holes), strict=True)
        common = self.common
        for fixed, values in zip(self.fixed.iter_unpack(data), rows, strict=True):
            yield values if fixed == common else None


def _outside(spans: Iterable[tuple[int, int]], holes: Iterable[Hole]) -> Iterator[Hole]:
    """Yield the bytes of spans around the holes, each of which lies in one of the spans."""
    ahead = iter(holes)
    hole = next(ahead, None)
    for start, end in spans:
        position = start
        while hole is not None and hole.at < end:
            yield Hole(position, hole.at - position, "s")
            position, hole = hole.at + hole.nbytes, next(ahead, None)
        yield Hole(position, end - position, "s")


def _form(holes: Iterable[Hole], nbytes: int) -> Form:
    """Return the form that takes the values in holes, which are in order, from so many bytes."""
    parts, position = ["<"], 0
    for at, length, kind in holes:
        parts.append(f"{at - position}x{length if kind == 's' else ''}{kind}")
        position = at + length
    return Form("".join([*parts, f"{nbytes - position}x"]))


_NOTHING = Template.of(b"", ())


class ArchiveTemplate(Struct, eq=False):
    """An archive that others are compared with: all of it but the content of its ``payloads``.

    ``template`` is of the bytes of ``readings``. Its groups of holes are the root's name in each
    record's name, the CRC-32 of payloads beside them, and those in the directory.
    ``names`` and ``storages`` have the positions in the directory of records, by their names in the
    root, and of storages, by their keys; ``file`` is what the archive holds, if that was read and
    is the same in all that match.
    """

    records: tuple[ZipRecord, ...]
    payloads: tuple[int, ...]
    readings: _Spans
    template: Template
    names: dict[str, int]
    storages: dict[str, int]
    file: TorchFile | None = None

    @classmethod
    def of(
        cls,
        records: Iterable[ZipRecord],
        folder: str,
        payloads: tuple[int, ...] = (),
        readings: _Spans = (),
        template: Template = _NOTHING,
    ) -> ArchiveTemplate:
        """Return an archive by its records, of which torch.save's are in a ``folder``.

        Without ``readings`` no other is compared with it.
        """
        members = tuple(records)
        entries = ((r.name, at) for at, r in enumerate(members) if r.name.startswith(folder))
        names = {name[len(folder) :]: at for name, at in entries}
        storages = {n[len(_STORAGES) :]: at for n, at in names.items() if n.startswith(_STORAGES)}
        return cls(members, payloads, readings, template, names, storages)

    def match(self, region: Region) -> Sibling | None:
        """Return an archive of the same number of bytes that is similar; else None."""
        if not all(starmap(region.is_at_hand, self.readings)):
            if region.reads is None:
                return None
            region.expect((start for start, _ in self.readings), len(self.records))
        values = self.template.match(region.joined(self.readings))
        sums = self.sums_in(values)
        root = values[0][0].decode() if values and sums else ""
        return Sibling(self, root, dict(zip(self.payloads, sums, strict=True))) if root else None

    def sums_in(self, values: Values | None) -> tuple[int, ...]:
        """Return the CRC-32 of ``payloads`` from an archive's holes; none if these contradict."""
        if values is None:
            return ()
        roots, local_sums, sums = values
        root = roots[0]
        is_whole = local_sums == sums and any(sums) and roots.count(root) == len(roots)
        return sums if is_whole and b"/" not in root and root.isascii() else ()


class Sibling(Struct, frozen=True):
    """An archive that matches a template: its root's name, and the CRC-32 of its own records."""

    template: ArchiveTemplate
    root: str = ""
    crcs: Mapping[int, int] = MappingProxyType({})

    @property
    def has_sums(self) -> bool:
        """Whether its writer stored the CRC-32 of storages: without any, all are 0."""
        return has_checksums(map(self.record, self.template.storages.values()))

    def record(self, at: int) -> ZipRecord:
        """Return a record by its position in the directory."""
        name, method, crc, *places = self.template.records[at]
        crc = self.crcs.get(at, crc)
        return ZipRecord(self.root + name[len(self.root) :], method, crc, *places)

    def own_records(self, *, storages: bool) -> list[ZipRecord]:
        """Return the records, maybe without storages, that may differ between similar archives."""
        records = map(self.record, self.template.payloads)
        return [record for record in records if storages or not record.is_storage]


class Templates:
    """Learns from some archives, and judges others by them.

    Unless it ``reads``, it learns only from those whose headers are in memory.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._reads = reads
        self._by_size: dict[int, list[ArchiveTemplate]] = {}
        self._count = 0

    def find(self, region: Region) -> Sibling | None:
        """Return the archive that fills a region, if it is similar to one that is known."""
        matches = (template.match(region) for template in self._by_size.get(region.nbytes, []))
        return next((sibling for sibling in matches if sibling is not None), None)

    def learn(self, region: Region, records: Collection[ZipRecord]) -> Sibling | None:
        """Remember an archive, and return it; None if others cannot be judged by it.

        They cannot if any of its headers contradicts its directory, or bytes belong to no record.
        """
        templates = self._by_size.get(region.nbytes, [])
        is_full = len(self._by_size) >= _MOST_SIZES or len(templates) >= _MOST_OF_A_SIZE
        if is_full or self._count + len(records) > _MOST_RECORDS:
            return None
        template = None
        if _is_plain(records):
            template = _template_of(region, tuple(records), self._reads)
        sibling = template.match(region) if template is not None else None
        if template is not None and sibling is not None:
            self._count += len(records)
            self._by_size[region.nbytes] = [*templates, template]
        return sibling


def is_compared(record: ZipRecord) -> bool:
    """Return whether archives that match have the same content of a record."""
    is_varied = record.is_storage or record.name.endswith(_CHECKSUM_OVER_ALL)
    return not is_varied and record.size <= _LARGEST_ALIKE


def _template_of(
    region: Region, records: tuple[ZipRecord, ...], reads: bool
) -> ArchiveTemplate | None:
    payloads = tuple(at for at, record in enumerate(records) if not is_compared(record))
    varied = [records[at] for at in payloads]
    compared = tuple(_between(varied, region.nbytes))
    is_readable = reads and region.reads is not None
    if not is_readable and not all(starmap(region.is_at_hand, compared)):
        return None
    if not _is_sound(region, records):
        return None
    root = records[0].name.partition("/")[0]
    readings = _readings(region, compared)
    starts = _places(readings, (start for start, _ in compared))
    spans = [(at, at + end - start) for at, (start, end) in zip(starts, compared, strict=True)]

    def holes(starts: Iterable[int], nbytes: int, kind: str) -> list[Hole]:
        return [Hole(at, nbytes, kind) for at in _places(readings, starts)]

    template = Template.of(
        region.joined(readings),
        spans,
        holes(sorted(at for record in records for at in _names(record)), len(root), "s"),
        holes(map(_crc_beside, varied), CRC32_NBYTES, "L"),
        holes((record.noted for record in varied), CRC32_NBYTES, "L"),
    )
    return ArchiveTemplate.of(records, f"{root}/", payloads, readings, template)


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

    A storage's is not compared: if it has a descriptor, only that, marked, may state the CRC-32.
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


def _readings(region: Region, compared: _Spans) -> _Spans:
    """Return what is read to compare spans: both ends of a region, if these have all of them."""
    ends = tuple((at, at + nbytes) for _, at, nbytes in edge_spans("", 0, region.nbytes))
    are_inside = all(any(low <= at and to <= high for low, high in ends) for at, to in compared)
    return ends if are_inside else compared


def _places(spans: Sequence[tuple[int, int]], starts: Iterable[int]) -> Iterator[int]:
    """Yield where bytes of a region, in order, are once its spans are joined."""
    ahead, base = iter(spans), 0
    start, end = next(ahead)
    for at in starts:
        while at >= end:
            base += end - start
            start, end = next(ahead)
        yield base + at - start
