"""Read the tiles of a plan as they are to be written: read, check, gather, cast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from operator import mul, sub
from typing import TYPE_CHECKING, NamedTuple

from ckptool.core.box import Box, contiguous
from ckptool.core.casts import is_computed
from ckptool.core.catalog import Chunk, Extent, TensorEntry, stored_places
from ckptool.core.plan import Tile, TileSource
from ckptool.core.sharding.table import WholeTensor
from ckptool.engine.checksum import RecordCheck, crc32, crc32_combine
from ckptool.engine.read.containers import open_chunk, open_tile
from ckptool.engine.read.row_cache import RowCache
from ckptool.engine.read.runs import entry_runs, row_major_runs, tile_runs
from ckptool.engine.read.tiles import LARGE, Job
from ckptool.storage.local import Files

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Array, Gatherer

ExtentRun = tuple[Extent, int, int, int]
"""A run of bytes: its place, file offset, offset in a tile and length."""


def run_of(tile: Tile, source: TileSource) -> ExtentRun | None:
    """Return the run of bytes of one source of a tile, None if it is not a run as stored."""
    at, where = source.chunk.at, source.where
    itemsize = tile.entry.source_dtype.itemsize
    if not isinstance(at, Extent) or at.ops or where.shape[1:] != tile.shape[1:]:
        return None
    if not contiguous(at.strides, source.box.shape, itemsize):
        return None
    inside = map(sub, source.box.lo, source.chunk.box.lo)
    start = at.offset + sum(map(mul, inside, at.strides))
    skip = where.lo[0] * math.prod(tile.shape[1:]) * itemsize if where.lo else 0
    return at, start, skip, source.box.volume * itemsize


def touch(
    records: RecordCheck, entry: TensorEntry, chunk: Chunk, *, required: bool = False
) -> None:
    """Note which records a chunk of a tensor is made from."""
    for at in stored_places(open_chunk(chunk).at):
        if isinstance(at, Extent) and at.record is not None:
            records.touch(at.record, entry.name, required=required)


class PlannedPiece(NamedTuple):
    """Bytes of a tile in the form to be written, at the offset ``skip``."""

    tile: Tile
    skip: int
    data: memoryview
    crc: int

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        return len(self.data)


class PlanReader:
    """Reads tiles of a plan for one thread.

    Tiles of straight runs of bytes are read piece by piece, wide columns are cut from rows that are
    read once; others are gathered. Numpy is imported only on demand. All pieces of checksummed
    records are noted in ``records``.
    """

    def __init__(self, source: Files, records: RecordCheck) -> None:
        self._source = source
        self._records = records
        self._reader = source.reader()
        self._buffer = memoryview(bytearray(source.tile))

    @cached_property
    def _rows(self) -> RowCache:
        return RowCache(self._reader, self._records.note)

    @cached_property
    def _gatherer(self) -> Gatherer:
        from ckptool.engine.read.gather import Gatherer

        return Gatherer(self._source, self._records.note)

    def pieces(self, tiles: Sequence[Tile]) -> Iterator[PlannedPiece]:
        """Read tiles that share rows of the source, each piece valid until the next."""
        self._forget_rows()
        if tiles[0].pieces:
            yield from self._cut_whole(tiles)
            return
        for tile in map(open_tile, tiles):
            straight = self._straight_runs(tile)
            if len(straight) == len(tile.sources) and tile.entry.source_dtype == tile.entry.dtype:
                for run in straight:
                    yield from self._copy_run(tile, run)
            else:
                data = self._bytes_of(tile, straight, shared=len(tiles) > 1)
                yield PlannedPiece(tile, 0, data, crc32(data))

    def _cut_whole(self, tiles: Sequence[Tile]) -> Iterator[PlannedPiece]:
        """Read a tensor, and cut tiles from it: whole rows without numpy."""
        entry, values = tiles[0].entry, None
        if not isinstance(entry.chunks, WholeTensor):
            for chunk in entry.chunks:
                touch(self._records, entry, chunk)
        whole = self._read_rows(entry)
        row = len(whole) // (entry.shape[0] if entry.shape else 1) if whole else 0
        for tile in tiles:
            data = None if whole is None else _rows_of(tile, whole, row)
            if data is None:
                from ckptool.engine.read.gather import array, cut, raw

                if values is None and whole is not None:
                    values = array(entry.shape, entry.dtype, whole)
                elif values is None:
                    values = self._gatherer.read_values(entry, Box.whole(entry.shape))
                data = raw(cut(values, tile))
            yield PlannedPiece(tile, 0, data, crc32(data))

    def _read_rows(self, entry: TensorEntry) -> memoryview | None:
        """Return a small tensor that is stored as rows of the type to be written; else None."""
        runs = row_major_runs(entry) if entry.source_dtype is entry.dtype else None
        if runs is None:
            return None
        filled = 0
        for file, start, nbytes, record in runs:
            data = self._buffer[filled : filled + nbytes]
            self._reader.read_into(file, start, data)
            if record is not None:
                self._records.piece(record, start, nbytes, crc32(data))
            filled += nbytes
        return self._buffer[:filled]

    def data(self, tile: Tile, *, shared: bool) -> memoryview:
        """Return the bytes of a tile in the form to be written, valid until the next call.

        If other tiles use the same rows of the source, these are read whole.
        """
        self._forget_rows()
        tile = open_tile(tile)
        return self._bytes_of(tile, self._straight_runs(tile), shared=shared)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
        if "_gatherer" in self.__dict__:
            self._gatherer.close()

    def _forget_rows(self) -> None:
        if "_gatherer" in self.__dict__:
            self._gatherer.forget()
        if "_rows" in self.__dict__:
            self._rows.forget()

    def _straight_runs(self, tile: Tile) -> list[ExtentRun]:
        """Return the sources of a tile that are straight runs of bytes; note its records."""
        for source in tile.sources:
            touch(self._records, tile.entry, source.chunk)
        runs = (run_of(tile, source) for source in tile.sources)
        return [run for run in runs if run is not None]

    def _copy_run(self, tile: Tile, run: ExtentRun) -> Iterator[PlannedPiece]:
        """Read a run of bytes in pieces that fit the processor's cache."""
        at, start, skip, nbytes = run
        most = min(self._source.piece, len(self._buffer))
        count = -(-nbytes // most) or 1
        total, step = 0, -(-nbytes // count) or 1
        for done in range(0, nbytes, step):
            data = self._buffer[: min(step, nbytes - done)]
            self._reader.read_into(at.file, start + done, data)
            crc = crc32(data)
            total = crc32_combine(total, crc, len(data)) if done else crc
            yield PlannedPiece(tile, skip + done, data, crc)
        if at.record is not None:
            self._records.piece(at.record, start, nbytes, total)

    def _bytes_of(self, tile: Tile, straight: list[ExtentRun], *, shared: bool) -> memoryview:
        """Return the bytes of a tile in the form to be written; note its ``straight`` runs."""
        if shared and tile.entry.source_dtype == tile.entry.dtype:
            data = self._rows.columns(tile)
            if data is not None:
                return data
        return self._gather_bytes(tile, straight, shared=shared)

    def _gather_bytes(self, tile: Tile, straight: list[ExtentRun], *, shared: bool) -> memoryview:
        from ckptool.engine.read.gather import raw
        from ckptool.engine.read.rounding import cast

        values = self._gather(tile, shared=shared)
        data = raw(values)
        for at, start, skip, nbytes in straight:
            if at.record is not None:
                piece = data[skip : skip + nbytes]
                self._records.piece(at.record, start, nbytes, crc32(piece))
        return raw(cast(values, tile.entry.source_dtype, tile.entry.dtype))

    def _gather(self, tile: Tile, *, shared: bool) -> Array:
        """Return the tile's elements as in the source, in an array of the tile's shape."""
        from ckptool.engine.read.gather import array

        dtype = tile.entry.source_dtype
        nbytes = math.prod(tile.shape) * dtype.itemsize
        values = array(tile.shape, dtype, self._gatherer.memory(nbytes))
        for source in tile.sources:
            where = source.where
            view = values[tuple(map(slice, where.lo, where.hi))] if where.lo else values
            self._gatherer.fill(view, source.chunk, source.box, dtype, shared=shared)
        return values


def _rows_of(tile: Tile, whole: memoryview, row: int) -> memoryview | None:
    """Return a tile that is whole rows of a tensor, of ``row`` bytes each; None if it is not."""
    if len(tile.pieces) > 1:
        return None
    box, shape = tile.pieces[0].box, tile.entry.shape
    if not shape:
        return whole
    if tile.shape != box.shape or tile.shape[1:] != shape[1:]:
        return None
    return whole[box.lo[0] * row : box.hi[0] * row]


def plan_job(tiles: Sequence[Tile]) -> Job[Sequence[Tile], PlanReader, PlannedPiece]:
    """Return the job that reads tiles which share rows of the source."""
    if tiles[0].pieces:
        entry = tiles[0].entry
        runs = partial(entry_runs, entry, [Box.whole(entry.shape)])
        nbytes = entry.nbytes // len(tiles)
        return Job(tiles, lambda reader: reader.pieces(tiles), [runs], nbytes)
    runs = partial(tile_runs, tiles, shared=len(tiles) > 1)
    entry, pieces = tiles[0].entry, sum(len(tile.sources) for tile in tiles)
    is_moved = entry.source_dtype == entry.dtype and not is_computed(entry)
    nbytes = sum(tile.nbytes for tile in tiles) // max(1, pieces) if is_moved else LARGE
    return Job(tiles, lambda reader: reader.pieces(tiles), [runs], nbytes)
