"""Archives of ranks that are laid out alike: one is read, the others are compared with it.

torch.save names the records of a file after the file, and stores the CRC-32 of each in two places
(torch 1.6 to 2.13). If the archives of two ranks have shards of one size, they differ only in these
names and sums, in the storages, and in the pickle: all other bytes are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.serialization.zip import (
    CRC32_NBYTES,
    LOCAL,
    STORED,
    STREAMED,
    Region,
    ZipRecord,
    find_directory,
    has_checksums,
)
from ckptool.serialization.zip_headers import check_headers, count_unclaimed_bytes

if TYPE_CHECKING:
    import numpy as np

_NAME_IN_ENTRY = 30
"""Bytes from the CRC-32 of a directory's entry to its name."""
_IN_LOCAL_HEADER = 14
_DESCRIPTOR = b"PK\x07\x08"
_LEAST_DESCRIPTOR = 12
"""Bytes of a descriptor without its mark."""
_LONGEST_ROOT = 255
"""Characters: its places in all headers are kept."""
CHECKSUM_OVER_ALL = "/.data/serialization_id"
"""The end of the name of a record that differs whenever a storage does."""
_LARGEST_ALIKE = 1 << 12
"""Bytes of the largest record that is compared, if it is neither a storage nor a pickle."""
_MOST_LAYOUTS = 8


class Layout(NamedTuple):
    """All bytes of an archive but the content of its ``own`` records, and which may differ.

    ``fixed`` are the bytes of ``spans``, and ``free`` tells for each whether another archive may
    have another one there. The other fields are places in ``fixed``: of the root's name in each
    record's name, and of the two CRC-32 of each own record.
    """

    nbytes: int
    records: tuple[ZipRecord, ...]
    own: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    fixed: np.ndarray[Any, Any]
    free: np.ndarray[Any, Any]
    roots: np.ndarray[Any, Any]
    noted: np.ndarray[Any, Any]
    repeated: np.ndarray[Any, Any]

    def numbers(self) -> dict[str, int]:
        """Return for each storage, by its key, its position among the own records."""
        names = [self.records[at].name.split("/", 2) for at in self.own]
        return {name[2]: at for at, name in enumerate(names) if name[1] == "data" and name[2:]}

    def match(self, region: Region) -> Sibling | None:
        """Return an archive of the same number of bytes that has this layout; else None."""
        import numpy as np

        region.expect((start for start, _ in self.spans), len(self.records))
        found = np.frombuffer(region.joined(self.spans), "u1")
        if not self.free[np.flatnonzero(found != self.fixed)].all():
            return None
        roots, noted, repeated = found[self.roots], found[self.noted], found[self.repeated]
        root: bytes = roots[0].tobytes()
        is_whole = bool((roots == roots[0]).all() and (noted == repeated).all() and noted.any())
        if not is_whole or b"/" in root or not root.isascii():
            return None
        return Sibling(self, root.decode(), noted.view("<u4")[:, 0].tolist())


class Sibling(NamedTuple):
    """An archive with a known layout: the name of its root, and the CRC-32 of its own records."""

    layout: Layout
    root: str
    crcs: list[int]

    @property
    def has_sums(self) -> bool:
        """Whether its writer stored the CRC-32 of storages: without any, all are 0."""
        records = self.layout.records
        pairs = zip(self.layout.own, self.crcs, strict=True)
        return any(crc for at, crc in pairs if records[at].is_storage)

    def own_records(self, *, storages: bool = True) -> list[ZipRecord]:
        """Return the records whose content is not that of every archive with this layout."""
        records = self.layout.records
        pairs = zip(self.layout.own, self.crcs, strict=True)
        chosen = ((records[at], crc) for at, crc in pairs if storages or not records[at].is_storage)
        return [self._named(record)._replace(crc32=crc) for record, crc in chosen]

    def small_records(self) -> dict[str, ZipRecord]:
        """Return all records that are no storages, by name."""
        crcs = dict(zip(self.layout.own, self.crcs, strict=True))
        small = [
            self._named(record)._replace(crc32=crcs.get(at, record.crc32))
            for at, record in enumerate(self.layout.records)
            if not record.is_storage
        ]
        return {record.name: record for record in small}

    def records(self) -> dict[str, ZipRecord]:
        """Return all records by name, in the directory's order."""
        own = {record.name: record for record in self.own_records()}
        named = map(self._named, self.layout.records)
        return {record.name: own.get(record.name, record) for record in named}

    def _named(self, record: ZipRecord) -> ZipRecord:
        return record._replace(name=self.root + record.name[record.name.index("/") :])


_layouts: list[Layout] = []
"""The layouts that were learnt last."""


def find_sibling(region: Region) -> Sibling | None:
    """Return the archive that fills a region of a file, if its layout is known."""
    if region.source is None:
        return None
    alike = (layout for layout in tuple(_layouts) if layout.nbytes == region.nbytes)
    return next((one for one in (layout.match(region) for layout in alike) if one), None)


def learn_layout(region: Region, records: Mapping[str, ZipRecord]) -> Sibling | None:
    """Remember the layout of an archive, and return it; None if others cannot be judged by it.

    They cannot if any of its headers contradicts its directory, or bytes belong to no record.
    """
    layout = _layout_of(region, list(records.values()))
    if layout is None:
        return None
    _layouts[:] = [*_layouts[-_MOST_LAYOUTS + 1 :], layout]
    return layout.match(region)


def _layout_of(region: Region, records: list[ZipRecord]) -> Layout | None:
    import numpy as np

    own = [at for at, record in enumerate(records) if _is_own(record)]
    root = records[0].name.partition("/")[0] if own else ""
    is_plain = all(r.name.startswith(f"{root}/") and r.method == STORED for r in records)
    if not 0 < len(root) <= _LONGEST_ROOT or not root.isascii():
        return None
    if not is_plain or not has_checksums(records):
        return None
    if not _are_apart(region, records) or not all(_is_intact(region, r) for r in records):
        return None
    if count_unclaimed_bytes(region, records) or check_headers(region, records):
        return None
    spans = tuple(between(_contents(records[at] for at in own), region.nbytes))
    fixed = np.frombuffer(region.joined(spans), "u1")
    places = _Places(spans)
    noted = places.of([records[at].noted for at in own], CRC32_NBYTES)
    repeated = places.of([crc_beside(region, records[at]) for at in own], CRC32_NBYTES)
    starts = [start for record in records for start in _names(record)]
    roots = places.of(starts, len(root))
    sums = np.array([records[at].crc32 for at in own], "<u4").view("u1").reshape(-1, CRC32_NBYTES)
    is_stated = (fixed[noted] == sums).all() and (fixed[repeated] == sums).all()
    if not is_stated or (fixed[roots] != np.frombuffer(root.encode(), "u1")).any():
        return None
    free = np.zeros(len(fixed), bool)
    for parts in (noted, repeated, roots):
        free[parts] = True
    return Layout(
        region.nbytes, tuple(records), tuple(own), spans, fixed, free, roots, noted, repeated
    )


def _is_own(record: ZipRecord) -> bool:
    """Return whether the content of a record is not compared."""
    is_varied = record.is_storage or record.name.endswith((".pkl", CHECKSUM_OVER_ALL))
    return is_varied or record.size > _LARGEST_ALIKE


def _is_intact(region: Region, record: ZipRecord) -> bool:
    """Return whether a record that is compared with others matches its own CRC-32."""
    return _is_own(record) or (
        zlib.crc32(region.read(record.offset, record.stored)) == record.crc32
    )


def _are_apart(region: Region, records: Iterable[ZipRecord]) -> bool:
    """Return whether no header, record or directory overlaps another one."""
    position = 0
    for record in sorted(records, key=attrgetter("header")):
        if record.header < position:
            return False
        has_descriptor = bool(record.flags & STREAMED)
        position = record.offset + record.stored + _LEAST_DESCRIPTOR * has_descriptor
    return position <= find_directory(region)[0]


def _names(record: ZipRecord) -> tuple[int, int]:
    """Return where the name of a record begins: in the directory, and in its local header."""
    return record.noted + _NAME_IN_ENTRY, record.header + LOCAL.size


def crc_beside(region: Region, record: ZipRecord) -> int:
    """Return where the CRC-32 of a record is stated beside its bytes."""
    if not record.flags & STREAMED:
        return record.header + _IN_LOCAL_HEADER
    descriptor = record.offset + record.stored
    is_marked = region.read(descriptor, len(_DESCRIPTOR)) == _DESCRIPTOR
    return descriptor + len(_DESCRIPTOR) * is_marked


def _contents(records: Iterable[ZipRecord]) -> list[tuple[int, int]]:
    return sorted((record.offset, record.offset + record.stored) for record in records)


def between(free: Iterable[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the gaps between these spans, which are in order, up to ``nbytes``."""
    position = 0
    for start, end in free:
        if start > position:
            yield position, start
        position = max(position, end)
    if position < nbytes:
        yield position, nbytes


class _Places:
    """Finds bytes of a region among those of some spans of it, one after another."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        import numpy as np

        self._starts, ends = np.array(spans, "i8").T
        self._before = np.cumsum([0, *(ends - self._starts)[:-1]])

    def of(self, starts: Sequence[int], nbytes: int) -> np.ndarray[Any, Any]:
        """Return the places of so many bytes from each start, all of them in the spans."""
        import numpy as np

        found = np.searchsorted(self._starts, starts, "right") - 1
        first = np.asarray(starts) - self._starts[found] + self._before[found]
        places: np.ndarray[Any, Any] = first[:, None] + np.arange(nbytes)
        return places.astype("i4")
