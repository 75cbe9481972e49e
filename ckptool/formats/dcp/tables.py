"""The chunks of a ``.metadata`` whose records were read into columns, as tables.

A tensor gets a table if each of its chunks has just one item, none of them packed; that of any
other is read record by record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import gt
from typing import Any

from msgspec import Struct, field

from ckptool.core.box import BoxTable, distinct
from ckptool.core.catalog import Container
from ckptool.core.chunks import ChunkTable, ItemTable
from ckptool.errors import Damaged
from ckptool.serialization.archive.tensors import read_sizes
from ckptool.serialization.pickle.rows import INTEGER, OBJECT, Rows

_LARGEST = 1 << 62
_LARGEST_REST = 1 << 23
_FEW = 16
"""Chunks up to which tensors with equal records share boxes and order: most are cut alike."""
_OF_CHUNKS = {"offsets", "sizes"}


DATA = re.compile(r"[^/]*?__([0-9]{1,9})_([0-9]+)\.distcp")


@lru_cache(maxsize=4096)
def rank_of(file: str) -> int | None:
    """Return the rank that wrote a data file, by its name."""
    match = DATA.fullmatch(file)
    return int(match[1]) if match else None


class Unfit(Exception):
    """Records are unlike most others; they are read one by one."""


class _Columns(Struct):
    """Items of all tensors: numbers of names and files, offsets of chunks, and their places."""

    names: list[Any] = field(default_factory=list)
    dims: list[Any] = field(default_factory=list)
    lows: list[Any] = field(default_factory=list)
    files: list[Any] = field(default_factory=list)
    offsets: list[Any] = field(default_factory=list)
    lengths: list[Any] = field(default_factory=list)


def more_fields(chunk: Any) -> list[str]:
    """Return the fields of one or many ChunkStorageMetadata that torch (2.1 to 2.15) lacks."""
    fields = chunk.columns if type(chunk) is Rows else chunk.fields
    return [] if len(fields) == len(_OF_CHUNKS) else [*(fields.keys() - _OF_CHUNKS)]


class StoredTables:
    """The items of a ``.metadata`` as columns, by tensor; ``records`` are those in none."""

    def __init__(self, stored: Iterable[tuple[Any, Any]]) -> None:
        self.records: list[tuple[Any, Any]] = []
        self._columns = _Columns()
        self._names: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._by_name: dict[str, Any] = {}
        self._boxes: dict[BoxTable, BoxTable] = {}
        self._cuts: dict[tuple[int, int], BoxTable] = {}
        self._shared_boxes: dict[object, BoxTable] = {}
        self._orders: dict[object, Any] = {}
        singles = []
        for key, info in stored:
            if type(key) is not Rows:
                singles.append((key, info))
                continue
            try:
                self._add_rows(key, info)
            except Unfit:
                self.records += zip(key, info, strict=True)
        if self._names:
            self._add_singles(singles)
            self._sort()
        else:
            self.records += singles
        self.files = list(self._files)
        self._ranks = list(map(rank_of, self.files))

    def _add_rows(self, key: Rows, info: Rows) -> None:
        names = _texts(key, "fqn", self._names)
        lows, dims = _sizes(key, "offset")
        files = _texts(info, "relative_path", self._files)
        offsets, lengths = _naturals(info, "offset"), _naturals(info, "length")
        if "transform_descriptors" in info.columns and any(_objects(info, "transform_descriptors")):
            raise Unfit
        self._add(names, dims, lows, files, offsets, lengths)

    def _add(self, *columns: Any) -> None:
        store = self._columns
        lists = (store.names, store.dims, store.lows, store.files, store.offsets, store.lengths)
        for arrays, column in zip(lists, columns, strict=True):
            arrays.append(column)

    def _add_singles(self, singles: list[tuple[Any, Any]]) -> None:
        """Add the records between rows that are of the same tensors."""
        import numpy as np

        for key, info in singles:
            fields, where = key.fields, info.fields
            is_like = fields.get("fqn") in self._names and fields.get("offset") is not None
            if not is_like or where.get("transform_descriptors"):
                self.records.append((key, info))
                continue
            low = read_sizes(fields["offset"])
            file, *span = (where[name] for name in ("relative_path", "offset", "length"))
            if type(file) is not str or any(
                type(n) is not int or not 0 <= n < _LARGEST for n in span
            ):
                self.records.append((key, info))
                continue
            numbers = self._names[fields["fqn"]], self._files.setdefault(file, len(self._files))
            width = np.int32 if max(low, default=0) < 1 << 31 else np.int64
            column = np.array([low or (0,)], width)
            self._add(
                np.array(numbers[:1], np.int32),
                np.array([len(low)], np.int8),
                column,
                np.array(numbers[1:], np.int32),
                *(np.array([number], np.int64) for number in span),
            )

    def _sort(self) -> None:
        """Sort the items by tensor, in their own order."""
        import numpy as np

        columns = self._columns
        if not columns.names:
            return
        names = np.concatenate(columns.names)
        order = np.argsort(names, kind="stable")
        ends = np.cumsum(np.bincount(names, minlength=len(self._names)))
        widest, integers = max(low.shape[1] for low in columns.lows), np.result_type(*columns.lows)
        lows, begin = np.zeros((len(names), widest), integers), 0
        for low in columns.lows:
            begin, first = begin + len(low), begin
            lows[first:begin, : low.shape[1]] = low
        columns.names.clear()
        columns.lows.clear()
        lows, dims = lows[order], np.concatenate(columns.dims)[order]
        spans = (columns.files, columns.offsets, columns.lengths)
        files, offsets, lengths = (np.concatenate(column)[order] for column in spans)
        begins = [0, *ends.tolist()]
        for name, number in self._names.items():
            rows = slice(begins[number], begins[number + 1])
            items = ItemTable((), files[rows], offsets[rows], lengths[rows])
            self._by_name[name] = (dims[rows], lows[rows], items)

    def take(self, name: str, shape: tuple[int, ...], chunks: list[Any]) -> ChunkTable | None:
        """Return the table of a tensor; None if it has none, or none that matches its chunks."""
        if name not in self._by_name:
            return None
        dims, lows, items = self._by_name[name]
        try:
            boxes = self._boxes_of(shape, chunks)
            order = self._order(shape, boxes, dims, lows)
        except (Unfit, Damaged, KeyError, TypeError, AttributeError, ValueError):
            return None
        del self._by_name[name]
        files, offsets, lengths = items.file_numbers, items.offsets, items.lengths
        if order is not None:
            files, offsets, lengths = files[order], offsets[order], lengths[order]
        items = ItemTable(self.files, files, offsets, lengths)
        return ChunkTable(boxes, items, self._ranks)

    def rest(self) -> Iterator[tuple[tuple[str, tuple[int, ...]], Container]]:
        """Yield the items that no table took, by name and offset of the chunk."""
        files = self.files
        if sum(len(dims) for dims, _, _ in self._by_name.values()) > _LARGEST_REST:
            raise Damaged(f"more than {_LARGEST_REST:,} items that do not fit their chunks")
        for name, (dims, lows, items) in self._by_name.items():
            spans = (items.file_numbers.tolist(), items.offsets.tolist(), items.lengths.tolist())
            for count, low, file, *span in zip(dims.tolist(), lows.tolist(), *spans, strict=True):
                yield (name, tuple(low[:count])), Container(files[file], *span)

    def _boxes_of(self, shape: tuple[int, ...], chunks: list[Any]) -> BoxTable:
        """Return the boxes of a tensor's chunks, one table for all that are cut alike.

        Tensors whose metadata are equal have one list of chunks.
        """
        cut = id(chunks), len(shape)
        if cut not in self._cuts:
            self._cuts[cut] = self._find_boxes(shape, chunks)
        return self._cuts[cut]

    def _find_boxes(self, shape: tuple[int, ...], chunks: list[Any]) -> BoxTable:
        """Return the boxes of a list of chunks; an equal list's table, if one was found before."""
        if any(more_fields(chunk) for chunk in chunks):
            raise Unfit
        key: object = None
        if len(chunks) <= _FEW and Rows not in map(type, chunks):
            records = [(chunk.fields["offsets"], chunk.fields["sizes"]) for chunk in chunks]
            key = len(shape), *records
        table = self._shared_boxes.get(key)
        if table is None:
            boxes = _boxes(shape, chunks)
            table = self._boxes.setdefault(boxes, boxes)
            if key is not None:
                self._shared_boxes[key] = table
        return table

    def _order(self, shape: tuple[int, ...], boxes: BoxTable, dims: Any, lows: Any) -> Any:
        """Return the same as ``_match``; for few chunks once for all similar tensors."""
        if len(boxes) > _FEW:
            return _match(shape, boxes, dims, lows)
        stored = shape, id(boxes), dims.tobytes(), lows.tobytes()
        if stored not in self._orders:
            self._orders[stored] = _match(shape, boxes, dims, lows)
        return self._orders[stored]


def _boxes(shape: tuple[int, ...], chunks: list[Any]) -> BoxTable:
    """Return the boxes of a tensor's chunks; Unfit if one has another number of dims."""
    import numpy as np

    lows: list[Any] = []
    sizes: list[Any] = []
    for chunk in chunks:
        if type(chunk) is Rows:
            for field, arrays in (("offsets", lows), ("sizes", sizes)):
                numbers, dims = _sizes(chunk, field)
                if (dims != len(shape)).any():
                    raise Unfit
                arrays.append(numbers)
        else:
            fields = chunk.fields
            low, size = read_sizes(fields["offsets"]), read_sizes(fields["sizes"])
            if not len(low) == len(size) == len(shape):
                raise Unfit
            lows.append(np.array([low or (0,)], np.int64))
            sizes.append(np.array([size or (0,)], np.int64))
    lowest, sized = (np.concatenate(column).astype(np.int64) for column in (lows, sizes))
    lowest = lowest[:, : len(shape)]
    return BoxTable(lowest, lowest + sized[:, : len(shape)])


def _match(shape: tuple[int, ...], boxes: BoxTable, dims: Any, lows: Any) -> Any:
    """Return for each chunk the index of its item, None if these are in the same order.

    Raises Unfit unless each chunk has exactly one, at a distinct offset.
    """
    import numpy as np

    if len(lows) == len(boxes) == 1 and dims[0] == len(shape):
        low = boxes.lows[0].tolist()
        if lows[0, : len(shape)].tolist() != low or any(map(gt, low, shape)):
            raise Unfit
        return None
    strides = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * (size + 1))
    if len(lows) != len(boxes) or (dims != len(shape)).any() or strides.pop() >= _LARGEST:
        raise Unfit
    if (boxes.lows > shape).any() or (lows[:, : len(shape)] > shape).any():
        raise Unfit
    weights = np.array(strides[::-1], np.int64)[: len(shape)]
    chunk_keys, item_keys = boxes.lows @ weights, lows[:, : len(shape)].astype(np.int64) @ weights
    if (np.diff(chunk_keys) > 0).all() and (chunk_keys == item_keys).all():
        return None
    by_chunk, by_item = np.argsort(chunk_keys), np.argsort(item_keys)
    keys = chunk_keys[by_chunk]
    if (keys != item_keys[by_item]).any() or (np.diff(keys) == 0).any():
        raise Unfit
    order = np.empty(len(chunk_keys), np.int64)
    order[by_chunk] = by_item
    return order


def _objects(rows: Rows, name: str) -> list[Any]:
    """Return what a field refers to, each once; Unfit if it is a number, a text or a size."""
    kinds, numbers = rows.columns[name]
    if (kinds != OBJECT).any():
        raise Unfit
    return [rows.objects[code] for code in distinct(numbers[:, 0]).tolist()]


def _texts(rows: Rows, name: str, index: dict[str, int]) -> Any:
    """Return the numbers of a field's texts in an index, adding new ones; Unfit if not all text."""
    import numpy as np

    if name not in rows.columns or (rows.columns[name].kinds <= INTEGER).any():
        raise Unfit
    kinds, numbers = rows.columns[name]
    if (kinds >= 0).any():
        raise Unfit
    codes, inverse = np.unique(numbers[:, 0], return_inverse=True)
    texts = [rows.objects[code] for code in codes.tolist()]
    if not all(type(text) is str and text.isascii() for text in texts):
        raise Unfit
    return np.array([index.setdefault(text, len(index)) for text in texts], np.int32)[inverse]


def _naturals(rows: Rows, name: str) -> Any:
    """Return a field's integers; Unfit if one is negative or not an integer."""
    if name not in rows.columns:
        raise Unfit
    kinds, numbers = rows.columns[name]
    if (kinds != INTEGER).any() or numbers.min() < 0 or numbers.max() >= _LARGEST:
        raise Unfit
    return numbers[:, 0]


def _sizes(rows: Rows, name: str) -> tuple[Any, Any]:
    """Return a field's sizes ``[n, widest]`` and the length of each; Unfit if one is not a size."""
    if name not in rows.columns:
        raise Unfit
    kinds, numbers = rows.columns[name]
    if (kinds < 0).any() or numbers.min() < 0 or numbers.max() >= _LARGEST:
        raise Unfit
    return numbers, kinds


def are_sound(
    tables: Sequence[ItemTable], singles: Iterable[Container], sizes: Mapping[str, int]
) -> bool:
    """Return whether every item of tables is within its file, and overlaps no other.

    ``singles`` are the items of no table, ``sizes`` the bytes of each file.
    """
    import numpy as np

    numbers = {file: number for number, file in enumerate(tables[0].files)}
    places = [at for at in singles if at.file in numbers]
    spans = [(numbers[at.file], at.offset, at.nbytes) for at in places]
    columns = np.array(spans, np.int64).reshape(-1, 3)
    file = np.concatenate([columns[:, 0], *(items.file_numbers for items in tables)])
    begin = np.concatenate([columns[:, 1], *(items.offsets for items in tables)])
    end = begin + np.concatenate([columns[:, 2], *(items.lengths for items in tables)])
    limits = np.array([sizes.get(name, 0) for name in tables[0].files], np.int64)
    first = len(places)
    if (end[first:] > limits[file[first:]]).any() or (limits[file[first:]] == 0).any():
        return False
    order = np.lexsort((begin, file))
    file, begin, end = file[order], begin[order], end[order]
    return not ((begin[1:] < end[:-1]) & (file[1:] == file[:-1])).any()
