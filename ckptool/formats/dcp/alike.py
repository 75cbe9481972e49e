"""Similar items, opened many at a time.

torch writes the items of tensors of one shape and type as archives of the same bytes, except for
the elements and their CRC-32 (torch 2.1 to 2.13). One is opened; the others are compared with it in
everything that its opening read. An item that differs is left to ``locate_item``, which reports
why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from ckptool.core.catalog import Extent, Record, TensorEntry
from ckptool.core.chunks import ChunkTable, RecordTable
from ckptool.core.dtype import DType
from ckptool.errors import CkptoolError
from ckptool.formats.dcp.opening import Item, locate_item, plain_start
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


class _Alike:
    """Items of one kind: the ``first`` of them, and the offsets of all in each file."""

    def __init__(self, first: Item) -> None:
        self._first = first
        self._offsets: dict[str, list[int]] = {}

    def add(self, file: str, offset: int) -> None:
        """Add an item, which may be known already."""
        self._offsets.setdefault(file, []).append(offset)

    def open_model(self, source: Source) -> _Model | None:
        """Open the first if there are many; None if it is not plain, or damaged."""
        is_many = sum(map(len, self._offsets.values())) >= _FEWEST
        return _open_model(source, self._first) if is_many else None

    def match(self, source: Source, model: _Model) -> Iterator[tuple[str, int, int]]:
        """Yield the items that are similar to the model: file, offset, and CRC-32 of the record."""
        for file, offsets in self._offsets.items():
            yield from model.match(source, file, sorted({*offsets}))


def locate_alike(source: Source, items: Iterable[Item]) -> AlikePlaces:
    """Return the places of the elements of items that are similar to an opened one."""
    kinds: dict[Kind, _Alike] = {}
    for item in items:
        if not item.at.transforms:
            kinds.setdefault(kind_of(item), _Alike(item)).add(item.at.file, item.at.offset)
    places: AlikePlaces = {}
    for kind, alike in kinds.items():
        if (model := alike.open_model(source)) is not None:
            for file, at, crc in alike.match(source, model):
                places[file, at, kind] = model.place_at(file, at, crc)
    return places


def locate_tables(source: Source, entries: Iterable[TensorEntry]) -> dict[str, RecordTable]:
    """Return the chunks of tensors, by name, all of whose items are similar to opened ones.

    Those are in a table, and each is all of its item's only record.
    """
    kinds: dict[Kind, _Alike] = {}
    cuts: dict[object, list[_Alike]] = {}
    tables = [(e, e.chunks) for e in entries if isinstance(e.chunks, ChunkTable)]
    for entry, table in tables:
        cut = id(table.boxes), entry.source_dtype.name, table.items.lengths.tobytes()
        if cut not in cuts:
            pairs = zip(table.boxes, table.items, strict=True)
            items = [Item.of(entry, box, at) for box, at in pairs]
            cuts[cut] = [kinds.setdefault(kind_of(item), _Alike(item)) for item in items]
        for alike, (file, at, _) in zip(cuts[cut], table.items.spans(), strict=True):
            alike.add(file, at)
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for alike in kinds.values():
        model = alike.open_model(source)
        if model is not None and model.is_plain:
            start = model.place.offset - model.offset
            found |= {(file, at): (at + start, crc) for file, at, crc in alike.match(source, model)}
    made = ((entry.name, _record_table(entry, table, found)) for entry, table in tables)
    return {name: chunks for name, chunks in made if chunks is not None}


def _record_table(
    entry: TensorEntry, table: ChunkTable, found: Mapping[tuple[str, int], tuple[int, int]]
) -> RecordTable | None:
    """Return a table of the records ``found`` by file and offset of items; None if one is not."""
    import numpy as np

    records = [found.get((file, at)) for file, at, _ in table.items.spans()]
    known = [record for record in records if record is not None]
    if len(known) < len(records):
        return None
    offsets, crcs = np.array(known, np.int64).reshape(-1, 2).T
    return RecordTable(table, offsets, crcs, entry.source_dtype.itemsize)


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
    is_plain = plain_start(item, place) is not None
    edges = [(start - offset, length) for _, start, length in edge_spans(file, offset, nbytes)]
    if template.readings != tuple((at, at + length) for at, length in edges):
        return None  # read with longer edges
    return _Model(template, place, place.record, offset, nbytes, edges, is_plain)


class _Model(NamedTuple):
    """An opened item: what others match, and the place and record of its elements.

    ``edges`` is what is read of an item to compare it: where it begins, and its bytes. The elements
    are ``plain`` if they are all of the record, in order.
    """

    template: ArchiveTemplate
    place: Extent
    record: Record
    offset: int
    nbytes: int
    edges: list[tuple[int, int]]
    is_plain: bool

    def place_at(self, file: str, offset: int, crc: int) -> Extent:
        """Return the place of the elements of a similar item, whose record has this CRC-32."""
        shift, nbytes = offset - self.offset, self.record.nbytes
        record = Record(file, self.record.offset + shift, nbytes, crc)
        return Extent(file, self.place.offset + shift, self.place.strides, record, self.place.ops)

    def match(
        self, source: Source, file: str, offsets: Sequence[int]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the file, the offset and the CRC-32 of those items at offsets that are similar."""
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
                        yield file, at, sums[number]

    def _read(self, reader: SpanReader, file: str, offsets: Sequence[int]) -> bytes:
        """Return what is read of each item to open it, one after another; what adjoins at once."""
        spans = list[tuple[int, int]]()
        for start, nbytes in (
            (at + start, nbytes) for at in offsets for start, nbytes in self.edges
        ):
            begin = spans.pop()[0] if spans and spans[-1][1] == start else start
            spans.append((begin, start + nbytes))
        data, done = bytearray(self.template.template.fixed.size * len(offsets)), 0
        with memoryview(data) as memory:
            for start, end in spans:
                reader.read_into(file, start, memory[done : done + end - start])
                done += end - start
        return bytes(data)
