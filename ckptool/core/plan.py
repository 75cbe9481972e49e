"""Catalog x layout -> tiles: which bytes of the source fill which range of which output file."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from operator import add, sub
from typing import NamedTuple

from msgspec import Struct

from ckptool.core.box import Box, Piece
from ckptool.core.casts import is_computed
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    EncodedBlob,
    TensorEntry,
    coverage_problem,
    stored_places,
)
from ckptool.core.layout import (
    Data,
    Layout,
    Part,
    ScatteredData,
    WrittenChunks,
    row_tiles,
    tile_count,
    tiles,
    written_entries,
)
from ckptool.core.sharding.index import ChunkIndex
from ckptool.core.sharding.table import (
    ChunkTable,
    LateTable,
    WholeTensor,
    open_together,
    opened_chunks,
)
from ckptool.errors import Damaged, Unsupported, damaged

_BATCH = 16
_SMALL = 1 << 18
"""Bytes of a tensor up to which it is read whole for all of its parts."""
_KEPT = 4 << 20
"""Bytes of the source's rows that a reader keeps while it cuts columns out of them."""
_STRAIGHT = 4
"""Times as large as other tiles are those of whole rows, which are copied piece by piece."""


class TileSource(NamedTuple):
    """``box`` of the global tensor, from ``chunk``, goes to ``where`` in a tile."""

    chunk: Chunk
    box: Box
    where: Box


class Tile(NamedTuple):
    """A range of an output file: a C-ordered array of ``shape`` at byte ``offset``.

    It is filled from ``sources``; or from ``pieces`` of the tensor, which is then read whole for
    all tiles of the job, and ``sources`` is empty.
    """

    file: int
    part: int
    offset: int
    shape: tuple[int, ...]
    entry: TensorEntry
    sources: tuple[TileSource, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the output file."""
        return math.prod(self.shape) * self.entry.dtype.itemsize


class LayoutPart(NamedTuple):
    """A tensor part of a file: file ``file`` of the layout, part ``position``, byte ``offset``."""

    file: int
    position: int
    offset: int
    part: Data | ScatteredData


class Group(Struct, frozen=True):
    """Parts that are cut in step, ``rows`` rows a tile; or a single part if it is 0.

    Or, if the tensor is small, all of its parts ``at_once``, each of them one tile. The tiles of a
    single part are ``times`` as large as the limit.
    """

    parts: tuple[LayoutPart, ...]
    rows: int
    at_once: bool = False
    times: int = 1

    def tile_counts(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield each part's file, and the number of its tiles."""
        if self.at_once:
            yield from ((place.file, 1) for place in self.parts)
            return
        for place in self.parts:
            shape = place.part.shape
            if self.rows:
                yield place.file, -(-shape[0] // self.rows)
            else:
                yield place.file, tile_count(shape, place.part.itemsize, self.times * limit)


class Plan:
    """A checked pairing of a source's catalog with the layout of all of its tensors.

    Raises Damaged if the chunks of a tensor do not tile it exactly, Unsupported if two files have
    the same path.
    """

    def __init__(self, catalog: Catalog, layout: Layout) -> None:
        self.catalog = catalog
        self.layout = layout
        self.entries = list(catalog.tensors.values())
        self.numbers = {file.path: number for number, file in enumerate(layout.files)}
        self._indexes: dict[str, ChunkIndex] = {}
        self._cuts: dict[object, ChunkIndex] = {}
        if len(self.numbers) < len(layout.files):
            paths = Counter(file.path for file in layout.files)
            raise Unsupported(f"duplicate output file name {paths.most_common(1)[0][0]}")
        problems = [p for p in map(coverage_problem, self.entries) if p is not None]
        if problems:
            raise damaged(
                problems,
                subject="the chunks",
                hint="a shard is missing or its metadata is wrong; see `ckptool inspect"
                " --shards NAME`, or use --drop NAME to exclude the tensor",
            )

    @property
    def read_bytes(self) -> int:
        """Bytes of all tensors, once, in the source's types."""
        return sum(entry.elements * entry.source_dtype.itemsize for entry in self.entries)

    @property
    def compared_bytes(self) -> int:
        """Bytes of all tensors, in the source's types plus in those that are written."""
        return self.read_bytes + sum(entry.nbytes for entry in self.entries)

    @cached_property
    def largest_blob(self) -> int:
        """Bytes of the largest blob that must be decoded completely, stored plus decoded."""
        return max(
            (
                at.nbytes + at.size
                for entry in self.entries
                if not isinstance(entry.chunks, WholeTensor)
                for chunk in opened_chunks(entry.chunks)
                for at in stored_places(chunk.at)
                if isinstance(at, EncodedBlob)
            ),
            default=0,
        )

    def batches(self, numbers: Sequence[int]) -> Iterator[list[tuple[int, tuple[Part, ...]]]]:
        """Yield files of the layout with their parts, a few files at a time.

        The parts of one batch exist together; columns of the same rows share them in a batch.
        """
        for start in range(0, len(numbers), _BATCH):
            batch = numbers[start : start + _BATCH]
            yield [(number, self.layout.files[number].parts) for number in batch]

    def groups(self, files: Iterable[tuple[int, Sequence[Part]]], limit: int) -> list[Group]:
        """Group the tensor parts of some files: those that share the rows of a tensor.

        ``files`` are indices in the layout with their parts, ``limit`` the bytes of a tile.
        """
        by_rows: dict[object, list[LayoutPart]] = {}
        tensors, small = self.catalog.tensors, dict[str, bool]()
        for number, parts in files:
            offset = 0
            for position, part in enumerate(parts):
                nbytes = part.nbytes
                if isinstance(part, (Data, ScatteredData)):
                    place, name = LayoutPart(number, position, offset, part), part.name
                    if name not in small:
                        small[name] = _is_small(tensors[name], limit)
                    by_rows.setdefault(name if small[name] else _rows_of(place), []).append(place)
                offset += nbytes
        return [
            group
            for key, places in by_rows.items()
            for group in self._groups(places, limit, is_small=isinstance(key, str))
        ]

    def groups_of(self, name: str, table: WrittenChunks, limit: int) -> list[Group]:
        """Group the parts of one tensor as ``groups`` does those of each of the ``batches``."""
        by_rows: dict[object, list[LayoutPart]] = {}
        is_small = _is_small(self.catalog.tensors[name], limit)
        for at, chunk in enumerate(table):
            number = self.numbers[chunk.at.file]
            part = Data(name, chunk.box, table.itemsize)
            place = LayoutPart(number, at, chunk.at.offset, part)
            shared = number // _BATCH, name if is_small else _rows_of(place)
            by_rows.setdefault(shared, []).append(place)
        return [
            group
            for some in by_rows.values()
            for group in self._groups(some, limit, is_small=is_small)
        ]

    def _groups(self, places: list[LayoutPart], limit: int, *, is_small: bool) -> list[Group]:
        """Return the groups of parts that are written together.

        A small tensor is read at once, if as much of it is written.
        """
        entry = self.catalog.tensors[places[0].part.name]
        if not is_small:
            return _group(places, entry, self.index(entry), limit)
        solid = [(place, nbytes) for place in places if (nbytes := place.part.nbytes)]
        if sum([nbytes for _, nbytes in solid]) >= entry.nbytes:
            return [Group(tuple([place for place, _ in solid]), 0, at_once=True)]
        by_rows: dict[object, list[LayoutPart]] = {}
        for place in places:
            by_rows.setdefault(_rows_of(place), []).append(place)
        index = self.index(entry)
        return [group for some in by_rows.values() for group in _group(some, entry, index, limit)]

    def jobs(self, group: Group, limit: int) -> Iterator[list[Tile]]:
        """Yield the tiles of a group, in order; those of one job read the same source rows."""
        entry = self.catalog.tensors[group.parts[0].part.name]
        if group.at_once:
            yield [
                Tile(file, position, offset, part.shape, entry, (), part.pieces)
                for file, position, offset, part in group.parts
            ]
            return
        index = self.index(entry)
        limit *= group.times
        runs = [_tiles_of(place, entry, index, group.rows, limit) for place in group.parts]
        yield from map(list, zip(*runs, strict=True))

    def chunks(
        self, numbers: Iterable[int], names: Container[str] | None = None
    ) -> Iterator[tuple[TensorEntry, Chunk]]:
        """Yield the chunks, with their tensors, that some files of the layout are made from.

        Of all tensors, or those of ``names``. Late-opened chunks of one file are opened together.
        """
        for number in numbers:
            boxes = [
                (self.index(self.catalog.tensors[part.name]), part.name, whole)
                for part in self.layout.files[number].parts
                if isinstance(part, Data | ScatteredData) and (names is None or part.name in names)
                for whole, _ in part.pieces
            ]
            open_together(
                (chunks, [at for at, _ in index.overlaps(whole)])
                for index, name, whole in boxes
                if isinstance(chunks := self.catalog.tensors[name].chunks, LateTable)
            )
            for index, name, whole in boxes:
                entry = self.catalog.tensors[name]
                yield from ((entry, chunk) for chunk, _ in index.find(whole))

    def checking_file(self, entry: TensorEntry, box: Box) -> int:
        """Return the file, by index in the layout, whose writer checks the record of a box.

        It contains part of the box; of several that do, tensors' names choose different ones.
        """
        tables = self.layout.tables
        if tables is None and len(self._holders[entry.name]) == 1:
            return self._holders[entry.name][0]
        cut: object = entry.name if tables is None else tables[entry.name].cut
        if cut not in self._cuts:
            self._cuts[cut] = ChunkIndex(self._written[entry.name])
        return self.checker(
            entry,
            (
                self.numbers[place.file]
                for chunk, _ in self._cuts[cut].find(box)
                for place in stored_places(chunk.at)
            ),
        )

    @staticmethod
    def checker(entry: TensorEntry, files: Iterable[int]) -> int:
        """Return the one of files with parts of a record whose writer checks it."""
        numbers = sorted({*files})
        return numbers[zlib.crc32(entry.name.encode(errors="replace")) % len(numbers)]

    @cached_property
    def _holders(self) -> dict[str, list[int]]:
        """The parts' files, by their places in the layout, of each tensor by name."""
        holders: dict[str, list[int]] = {}
        for number, file in enumerate(self.layout.files):
            for part in file.parts:
                if isinstance(part, (Data, ScatteredData)):
                    holders.setdefault(part.name, []).append(number)
        return holders

    @cached_property
    def _written(self) -> dict[str, TensorEntry]:
        """The places of tensors whose chunks are in tables, by name."""
        tabled = {e.name: e for e in self.entries if isinstance(e.chunks, ChunkTable)}
        return written_entries(self.layout, tabled)

    def index(self, entry: TensorEntry) -> ChunkIndex:
        """Return the index of a tensor's chunks, made once."""
        if entry.name not in self._indexes:
            self._indexes[entry.name] = ChunkIndex(entry)
        return self._indexes[entry.name]


def _is_small(entry: TensorEntry, limit: int) -> bool:
    """Return whether a tensor is read whole for all of its parts, as tiles of ``limit`` bytes."""
    return 0 < entry.elements * entry.source_dtype.itemsize <= min(limit, _SMALL)


def _rows_of(place: LayoutPart) -> object:
    """Return the key shared by the parts of one group: the tensor and its rows."""
    part = place.part
    if isinstance(part, Data) and len(part.box.lo) > 1 and part.box.volume:
        return part.name, part.box.lo[0], part.box.hi[0]
    return place.file, place.position


def _group(
    places: list[LayoutPart], entry: TensorEntry, index: ChunkIndex, limit: int
) -> list[Group]:
    """Return one group; or, if a row of all is more than a few tiles, one for each part.

    The tiles of a group are as many rows as a reader keeps at once: whole ones of the source.
    """
    rows = places[0].part.shape[0] if len(places) > 1 else 0
    row, most = sum(place.part.nbytes for place in places) // max(1, rows), min(4 * limit, _KEPT)
    if rows and row <= most:
        whole = math.prod(entry.shape[1:]) * entry.source_dtype.itemsize
        return [Group(tuple(places), most // (max(row, whole) if whole <= most else row))]
    is_moved = entry.source_dtype == entry.dtype and not is_computed(entry)
    rows_of = entry.shape[1:] if is_moved and index.whole_rows else None
    return [
        Group((place,), 0, times=_STRAIGHT if place.part.shape[1:] == rows_of else 1)
        for place in places
    ]


def _tiles_of(
    place: LayoutPart, entry: TensorEntry, index: ChunkIndex, rows: int, limit: int
) -> Iterator[Tile]:
    part, offset = place.part, place.offset
    shape = part.shape
    pieces = [(inner, tuple(map(sub, whole.lo, inner.lo))) for whole, inner in part.pieces]
    cut = row_tiles(shape, rows) if rows else tiles(Box.whole(shape), part.itemsize, limit)
    for local in cut:
        sources = tuple(_sources(local, pieces, index))
        volume = local.volume
        if sum([source.box.volume for source in sources]) != volume:
            raise Damaged(f"{entry.name}: {local} of a local tensor {list(shape)} is not covered")
        yield Tile(place.file, place.position, offset, local.shape, entry, sources)
        offset += volume * part.itemsize


def _sources(
    local: Box, pieces: list[tuple[Box, tuple[int, ...]]], index: ChunkIndex
) -> Iterator[TileSource]:
    """Yield the sources that fill a box of a local tensor.

    ``pieces`` are boxes of the local tensor, each with its shift to the global tensor.
    """
    for inner, shift in pieces:
        common = local.intersect(inner) if local.lo else inner
        if common is None:
            continue
        wanted = Box(tuple(map(add, common.lo, shift)), tuple(map(add, common.hi, shift)))
        origin = tuple(map(add, local.lo, shift))
        for chunk, box in index.find(wanted):
            yield TileSource(chunk, box, box.relative_to(origin))
