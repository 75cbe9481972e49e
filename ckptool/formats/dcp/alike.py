"""Similar items, opened many at a time.

torch writes the items of tensors of one shape and type as archives of the same bytes, except for
the elements and their CRC-32 (torch 2.1 to 2.13). One is opened; the others are compared with it in
everything that its opening read. An item that differs is left to ``locate_item``, which reports
why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import starmap
from operator import itemgetter
from typing import NamedTuple

from ckptool.core.catalog import Extent, Record
from ckptool.core.dtype import DType
from ckptool.errors import CkptoolError
from ckptool.formats.dcp.opening import Item, locate_item
from ckptool.serialization.archive.cached import CachedArchive, match_cached
from ckptool.serialization.source import Source, SpanReader, edge_spans
from ckptool.serialization.zip import CRC32_NBYTES, Region

_FEWEST = 16
_AT_ONCE = 256
"""Items that are compared together."""

Kind = tuple[int, DType, tuple[int, ...]]
"""Bytes of an item, and the type and shape that the metadata says it has."""
AlikePlaces = dict[tuple[str, int, Kind], Extent]
"""The places of items' elements, by file, offset and kind."""


def kind_of(item: Item) -> Kind:
    """Return the kind that items must share to be similar."""
    return item.at.nbytes, item.dtype, item.shape


def locate_alike(source: Source, items: Iterable[Item]) -> AlikePlaces:
    """Return the places of the elements of items that are similar to an opened one."""
    by_kind: dict[Kind, dict[str, list[int]]] = {}
    firsts: dict[Kind, Item] = {}
    for item in items:
        if not item.at.transforms:
            kind = kind_of(item)
            by_kind.setdefault(kind, {}).setdefault(item.at.file, []).append(item.at.offset)
            firsts.setdefault(kind, item)
    places: AlikePlaces = {}
    for kind, by_file in by_kind.items():
        model = _open_model(source, firsts[kind]) if _are_many(by_file.values()) else None
        if model is not None:
            for file, offsets in by_file.items():
                for place, at in model.locate(source, file, sorted({*offsets})):
                    places[file, at, kind] = place
    return places


def _are_many(offsets: Iterable[Sequence[int]]) -> bool:
    return sum(map(len, offsets)) >= _FEWEST


def _open_model(source: Source, item: Item) -> _Model | None:
    """Open the item that others are compared with; None if it is not plain, or damaged."""
    try:
        place = locate_item(source, item)
        region = Region(source, item.at.file, item.at.offset, item.at.nbytes)
        archive = match_cached(region)
    except CkptoolError:
        return None
    if archive is None or len(archive.noted) != 1:
        return None
    if not all(starmap(region.is_at_hand, archive.spans)):  # read with longer edges
        return None
    if not isinstance(place, Extent) or place.record is None:
        return None
    return _Model(archive, place, place.record, item.at.offset, item.at.nbytes)


class _Model(NamedTuple):
    """An opened item: its archive, and the place and record of its elements."""

    archive: CachedArchive
    place: Extent
    record: Record
    offset: int
    nbytes: int

    def locate(
        self, source: Source, file: str, offsets: Sequence[int]
    ) -> Iterator[tuple[Extent, int]]:
        """Yield the places of the elements of a file's items at these offsets, with each offset."""
        start, inside = self.place.offset - self.offset, self.record.offset - self.offset
        strides, nbytes, ops = self.place.strides, self.record.nbytes, self.place.ops
        last = source.files.get(file, 0) - self.nbytes
        within = [at for at in offsets if 0 <= at <= last]
        with closing(source.reader()) as reader:
            for first in range(0, len(within), _AT_ONCE):
                some, crcs = within[first : first + _AT_ONCE], list[int]()
                with suppress(CkptoolError):  # reported when each is opened
                    crcs = self._checksums(self._read(reader, file, some))
                for at, crc in zip(some, crcs, strict=False):
                    if crc:
                        record = Record(file, at + inside, nbytes, crc)
                        yield Extent(file, at + start, strides, record, ops), at

    @property
    def _edges(self) -> int:
        """Bytes that are read of an item to open it."""
        return sum(nbytes for _, _, nbytes in edge_spans("", 0, self.nbytes))

    def _read(self, reader: SpanReader, file: str, offsets: Sequence[int]) -> bytes:
        """Return what is read of each item to open it, one after another."""
        data, done = bytearray(self._edges * len(offsets)), 0
        with memoryview(data) as memory:
            for at in offsets:
                for _, start, nbytes in edge_spans(file, at, self.nbytes):
                    reader.read_into(file, start, memory[done : done + nbytes])
                    done += nbytes
        return bytes(data)

    def _checksums(self, data: bytes) -> list[int]:
        """Return the CRC-32 that each item records, 0 for those that are not similar.

        Without numpy, which takes longer to import than a share's items to compare.
        """
        size, spans = self._edges, self.archive.spans
        (noted,) = self.archive.noted.values()
        known, done = list[bytes](), 0
        for start, end in spans:
            known.append(self.archive.read[done : done + end - start])
            done += end - start
        take = itemgetter(*map(self._slice_of, (*spans, (noted, noted + CRC32_NBYTES))))
        items = (take(data[at : at + size]) for at in range(0, len(data), size))
        same = tuple(known)
        return [int.from_bytes(each[-1], "little") if each[:-1] == same else 0 for each in items]

    def _slice_of(self, span: tuple[int, int]) -> slice:
        """Return where a span of an item is in what is read of it: both its ends, or all of it."""
        skipped = self.nbytes - self._edges
        shift = skipped if span[0] >= self._edges // 2 else 0
        return slice(span[0] - shift, span[1] - shift)
