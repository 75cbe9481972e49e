"""Similar items, opened many at a time.

torch writes the items of tensors of one shape and type as archives of the same bytes, except for
the elements and their CRC-32 (torch 2.1 to 2.13). One is opened; the others are compared with it in
everything that its opening read. An item that differs is left to ``locate_item``, which reports
why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from msgspec import Struct, field

from ckptool.core.catalog import Extent, Place, Record, TensorEntry
from ckptool.core.chunks import ChunkTable, RecordTable
from ckptool.core.dtype import DType
from ckptool.errors import CkptoolError
from ckptool.formats.dcp.opening import Item, closed_items, locate_item, plain_start
from ckptool.serialization.archive.read import find_template
from ckptool.serialization.archive.templates import ArchiveTemplate
from ckptool.serialization.source import NearReads, Source, SpanReader, edge_spans
from ckptool.serialization.zip import Region

_FEWEST = 16
"""Items of a kind, of which fewer are opened as fast as they are compared."""
_AT_ONCE = 256
"""Items that are compared together."""

_Table = tuple[TensorEntry, ChunkTable]
Kind = tuple[int, DType, tuple[int, ...]]
"""Bytes of an item, and the type and shape that the metadata says it has."""


class AlikeItems:
    """The unopened items of tensors, in groups of similar ones, of which one is opened."""

    def __init__(self, source: Source, entries: Iterable[TensorEntry]) -> None:
        self._source = source
        self._groups: dict[Kind, _ItemGroup] = {}
        self._tables: dict[str, RecordTable] = {}
        tables = list[_Table]()
        for entry in entries:
            if isinstance(entry.chunks, ChunkTable):
                tables.append((entry, entry.chunks))
                continue
            for item in closed_items(entry):
                if not item.at.transforms:
                    self._group(item).offsets[item.at.file].append(item.at.offset)
        if tables:
            self._match_tables(tables)
        else:
            self._match()

    def _group(self, item: Item) -> _ItemGroup:
        return self._groups.setdefault(_kind_of(item), _ItemGroup(item))

    def _match(self) -> None:
        for group in self._groups.values():
            group.match(self._source)

    def _match_tables(self, tables: Sequence[_Table]) -> None:
        """Match all items, those of tables by their joined columns; keep the tables that match."""
        import numpy as np

        kinds = self._number_kinds(tables)
        item_tables, files = [table.items for _, table in tables], tables[0][1].items.files
        offsets = np.concatenate([items.offsets for items in item_tables])
        keys = kinds * len(files) + np.concatenate([items.file_numbers for items in item_tables])
        order = np.argsort(keys, kind="stable")
        numbers, begins = np.unique(keys[order], return_index=True)
        groups, parts = list(self._groups.values()), list[tuple[_ItemGroup, str, Any]]()
        for number, rows in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
            group, file = groups[number // len(files)], files[number % len(files)]
            parts.append((group, file, rows))
            group.offsets[file] += offsets[rows].tolist()
        self._match()
        starts, crcs = np.empty(len(offsets), np.int64), np.empty(len(offsets), np.int64)
        for group, file, rows in parts:
            sums, ats = group.sums.get(file, {}), offsets[rows]
            starts[rows] = ats + (group.start or 0)
            is_plain = group.start is not None
            crcs[rows] = [sums.get(at, -1) if is_plain else -1 for at in ats.tolist()]
        self._keep(tables, starts, crcs)

    def _number_kinds(self, tables: Iterable[_Table]) -> Any:
        """Return the number of each item's group, found once for tensors that are cut alike."""
        import numpy as np

        cuts, numbers, columns = dict[object, Any](), dict[int, int](), list[Any]()
        for entry, table in tables:
            cut = id(table.boxes), entry.source_dtype.name, table.items.lengths.tobytes()
            if cut not in cuts:
                pairs = zip(table.boxes, table.items, strict=True)
                groups = [self._group(Item.of(entry, box, at)) for box, at in pairs]
                numbers = {id(group): n for n, group in enumerate(self._groups.values())}
                cuts[cut] = np.array([numbers[id(group)] for group in groups], np.int64)
            columns.append(cuts[cut])
        return np.concatenate(columns)

    def _keep(self, tables: Sequence[_Table], starts: Any, crcs: Any) -> None:
        """Keep the tables of which each item was matched, and its record is its elements."""
        import numpy as np

        ends = np.cumsum([len(table) for _, table in tables])
        misfits = {*np.searchsorted(ends, np.flatnonzero(crcs < 0), side="right").tolist()}
        begin = 0
        for at, ((entry, table), end) in enumerate(zip(tables, ends.tolist(), strict=True)):
            if at not in misfits:
                columns = starts[begin:end], crcs[begin:end]
                size = entry.source_dtype.itemsize
                self._tables[entry.name] = RecordTable(table, *columns, size)
            begin = end

    def locate(self, item: Item) -> Place:
        """Return where the elements of an item are; raises as ``locate_item`` does."""
        group, file, at = self._groups.get(_kind_of(item)), item.at.file, item.at.offset
        crc = None if group is None else group.sums.get(file, {}).get(at)
        if group is None or group.model is None or crc is None:
            return locate_item(self._source, item)
        return group.model.place_at(file, at, crc)

    def table(self, entry: TensorEntry) -> RecordTable | None:
        """Return the chunks of a tensor as a table, each of them all of its item's record.

        None if they are in no table, or one is only part of its record.
        """
        return self._tables.get(entry.name)


def _kind_of(item: Item) -> Kind:
    return item.at.nbytes, item.dtype, item.shape


class _ItemGroup(Struct, eq=False):
    """Items of one kind: the ``first`` of them, and the ``offsets`` of all in each file.

    ``sums`` has, by file and offset, the CRC-32 of the record of each that is similar to the first,
    the ``model``. Elements that are all of the record, in order, begin at byte ``start`` of each.
    """

    first: Item
    offsets: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    model: _Model | None = None
    start: int | None = None
    sums: dict[str, dict[int, int]] = field(default_factory=dict)

    def match(self, source: Source) -> None:
        """Open the first if there are many, and compare the others with it."""
        is_many = sum(map(len, self.offsets.values())) >= _FEWEST
        model = self.model = _open_model(source, self.first) if is_many else None
        if model is not None:
            self.start = model.place.offset - model.offset if model.is_plain else None
            for file, offsets in self.offsets.items():
                self.sums[file] = dict(model.match(source, file, sorted({*offsets})))


def _open_model(source: Source, item: Item) -> _Model | None:
    """Open the item that others are compared with; None if it is not plain, or damaged."""
    file, offset, nbytes = item.at.file, item.at.offset, item.at.nbytes
    try:
        place = locate_item(source, item)
        template = find_template(Region(NearReads(source), file, offset, nbytes))
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


class _Model(Struct, frozen=True):
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

    def match(self, source: Source, file: str, offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield those items at offsets that are similar: the offset, and the CRC-32."""
        (stored,) = self.template.storages.values()
        number = self.template.payloads.index(stored)
        last = source.files.get(file, 0) - self.nbytes
        starts = [at for at in offsets if 0 <= at <= last]
        with closing(source.reader()) as reader:
            for first in range(0, len(starts), _AT_ONCE):
                batch = starts[first : first + _AT_ONCE]
                try:
                    data = self._read(reader, file, batch)
                except CkptoolError:  # reported when each is opened
                    continue
                checksums = map(self.template.sums_in, self.template.template.match_each(data))
                for at, sums in zip(batch, checksums, strict=True):
                    if sums and sums[number]:
                        yield at, sums[number]

    def _read(self, reader: SpanReader, file: str, offsets: Sequence[int]) -> bytearray:
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
        return data
