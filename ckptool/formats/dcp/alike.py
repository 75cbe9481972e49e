"""Similar items, opened many at a time.

torch writes the items of tensors of one shape and type as archives of the same bytes, except for
the elements and their CRC-32 (torch 2.1 to 2.13). One is opened; the others are compared with it in
everything that its opening read. An item that differs is left to ``locate_item``, which reports
why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from ckptool.core.catalog import Extent, Record
from ckptool.core.dtype import DType
from ckptool.errors import CkptoolError
from ckptool.formats.dcp.opening import Item, locate_item
from ckptool.serialization.archive.read import find_template
from ckptool.serialization.archive.templates import ArchiveTemplate
from ckptool.serialization.source import Source, SpanReader, edge_spans
from ckptool.serialization.zip import Region

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
    file, offset, nbytes = item.at.file, item.at.offset, item.at.nbytes
    try:
        place = locate_item(source, item)
        template = find_template(Region(source, file, offset, nbytes))
    except CkptoolError:
        return None
    if template is None or len(template.storages) != 1:
        return None
    if not isinstance(place, Extent) or place.record is None:
        return None
    edges = [(start - offset, length) for _, start, length in edge_spans(file, offset, nbytes)]
    if template.readings != tuple((at, at + length) for at, length in edges):
        return None  # read with longer edges
    return _Model(template, place, place.record, offset, nbytes, edges)


class _Model(NamedTuple):
    """An opened item: what others match, and the place and record of its elements.

    ``edges`` is what is read of an item to compare it: where it begins, and its bytes.
    """

    template: ArchiveTemplate
    place: Extent
    record: Record
    offset: int
    nbytes: int
    edges: list[tuple[int, int]]

    def locate(
        self, source: Source, file: str, offsets: Sequence[int]
    ) -> Iterator[tuple[Extent, int]]:
        """Yield the places of the elements of a file's items at these offsets, with each offset."""
        start, inside = self.place.offset - self.offset, self.record.offset - self.offset
        strides, nbytes, ops = self.place.strides, self.record.nbytes, self.place.ops
        (stored,) = self.template.storages.values()
        number = self.template.own.index(stored)
        last = source.files.get(file, 0) - self.nbytes
        within = [at for at in offsets if 0 <= at <= last]
        with closing(source.reader()) as reader:
            for first in range(0, len(within), _AT_ONCE):
                batch = within[first : first + _AT_ONCE]
                try:
                    data = self._read(reader, file, batch)
                except CkptoolError:  # reported when each is opened
                    continue
                found = map(self.template.sums_in, self.template.template.match_each(data))
                for at, sums in zip(batch, found, strict=True):
                    if sums and sums[number]:
                        record = Record(file, at + inside, nbytes, sums[number])
                        yield Extent(file, at + start, strides, record, ops), at

    def _read(self, reader: SpanReader, file: str, offsets: Sequence[int]) -> bytes:
        """Return what is read of each item to open it, one after another."""
        data, done = bytearray(self.template.template.fixed.size * len(offsets)), 0
        with memoryview(data) as memory:
            for at in offsets:
                for start, nbytes in self.edges:
                    reader.read_into(file, at + start, memory[done : done + nbytes])
                    done += nbytes
        return bytes(data)
