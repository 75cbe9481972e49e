"""Read the tiles of a plan as they are to be written: read, check, gather, cast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from operator import mul, sub
from typing import TYPE_CHECKING, NamedTuple

from ckptool.core.box import Box, contiguous
from ckptool.core.casts import is_computed
from ckptool.core.catalog import Chunk, Extent, TensorEntry, stored_places
from ckptool.core.sharding.groups import Tile, TileSource
from ckptool.core.sharding.table import WholeTensor
from ckptool.engine.checksum import RecordCheck, crc32, crc32_combine
from ckptool.engine.read.containers import open_chunk, open_tile
from ckptool.engine.read.runs import row_major_runs, tile_runs
from ckptool.engine.read.tiles import LARGE, ByteReader, Job
from ckptool.errors import Damaged
from ckptool.storage.local import Files

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Array, Gatherer

_PLANNED = 64
"""Jobs that are planned at a time: after each copy nothing that planning needs is in the
processor's cache, and it takes twice as long."""
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
    records: RecordCheck,
    entry: TensorEntry,
    chunk: Chunk,
    *,
    required: bool = False,
    joined: bool = False,
) -> None:
    """Note which records a chunk of a tensor is made from."""
    for at in stored_places(open_chunk(chunk).at):
        if isinstance(at, Extent) and at.record is not None:
            records.touch(at.record, entry.name, required=required, joined=joined)


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

    Tiles of straight runs of bytes are read piece by piece; those of a band are cut from it, others
    are gathered. Numpy is imported only on demand. All pieces of checksummed records are noted in
    ``records``.
    """

    def __init__(self, source: Files, records: RecordCheck) -> None:
        self._source = source
        self._records = records
        self._reader = source.reader()
        self._buffer = memoryview(bytearray(source.tile))
        self._tile = memoryview(b"")

    @cached_property
    def _gatherer(self) -> Gatherer:
        from ckptool.engine.read.gather import Gatherer

        return Gatherer(self._source, ByteReader(self._source, self._records.note))

    def pieces(self, tiles: Sequence[Tile]) -> Iterator[PlannedPiece]:
        """Read the tiles of a job, each piece valid until the next."""
        if tiles[0].band is not None:
            for tile, data in self._cut(tiles, tiles[0].band):
                yield PlannedPiece(tile, 0, data, crc32(data))
            return
        for tile in map(open_tile, tiles):
            straight = self._straight_runs(tile)
            if len(straight) == len(tile.sources) and tile.entry.source_dtype == tile.entry.dtype:
                for run in straight:
                    yield from self._copy_run(tile, run)
            else:
                data = self._gather_bytes(tile, straight)
                yield PlannedPiece(tile, 0, data, crc32(data))

    def data(self, tile: Tile) -> memoryview:
        """Return the bytes of a tile in the form to be written, valid until the next call."""
        if tile.band is not None:
            return next(self._cut([tile], tile.band))[1]
        tile = open_tile(tile)
        return self._gather_bytes(tile, self._straight_runs(tile))

    def _cut(self, tiles: Sequence[Tile], band: Box) -> Iterator[tuple[Tile, memoryview]]:
        """Read a band of a tensor, and cut tiles from it, each valid until the next.

        Whole rows of a small tensor are cut without numpy.
        """
        entry, values = tiles[0].entry, None
        small = self._read_small(entry) if band == Box.whole(entry.shape) else None
        row = len(small) // (entry.shape[0] if entry.shape else 1) if small else 0
        for tile in tiles:
            data = None if small is None else _rows_of(tile, small, row)
            if data is None:
                from ckptool.engine.read.gather import array, cut

                if values is None and small is not None:
                    values = array(entry.shape, entry.dtype, small)
                elif values is None:
                    values = self._read_band(entry, band)
                data = cut(values, tile, self._memory(tile.nbytes))
            yield tile, data

    def _read_small(self, entry: TensorEntry) -> memoryview | None:
        """Return a small tensor that is stored as rows of the type to be written; else None."""
        if entry.source_dtype is not entry.dtype or entry.nbytes > len(self._buffer):
            return None
        runs = row_major_runs(entry)
        if runs is None:
            return None
        if not isinstance(entry.chunks, WholeTensor):
            for chunk in entry.chunks:
                touch(self._records, entry, chunk)
        filled = 0
        for file, start, nbytes, record in runs:
            data = self._buffer[filled : filled + nbytes]
            self._reader.read_into(file, start, data)
            if record is not None:
                self._records.piece(record, start, nbytes, crc32(data))
            filled += nbytes
        return self._buffer[:filled]

    def _read_band(self, entry: TensorEntry, band: Box) -> Array:
        """Return a box of a tensor in the type to be written, valid until the next."""
        volume = 0
        for chunk, shared in self._gatherer.chunks(entry, band):
            touch(self._records, entry, chunk)
            volume += shared.box.volume
        if volume != band.volume:
            raise Damaged(f"{entry.name}: {band} is not covered")
        return self._gatherer.read_values(entry, band)

    def _memory(self, nbytes: int) -> memoryview:
        """Return memory for a tile, which the next call may return again."""
        if nbytes > len(self._tile):
            self._tile = memoryview(bytearray(nbytes))
        return self._tile

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
        if "_gatherer" in self.__dict__:
            self._gatherer.close()

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

    def _gather_bytes(self, tile: Tile, straight: list[ExtentRun]) -> memoryview:
        """Return the bytes of a tile in the form to be written; note its ``straight`` runs."""
        from ckptool.engine.read.gather import raw
        from ckptool.engine.read.rounding import cast

        values = self._gather(tile)
        data = raw(values)
        for at, start, skip, nbytes in straight:
            if at.record is not None:
                piece = data[skip : skip + nbytes]
                self._records.piece(at.record, start, nbytes, crc32(piece))
        return raw(cast(values, tile.entry.source_dtype, tile.entry.dtype))

    def _gather(self, tile: Tile) -> Array:
        """Return the tile's elements as in the source, in an array of the tile's shape."""
        from ckptool.engine.read.gather import array

        dtype = tile.entry.source_dtype
        nbytes = math.prod(tile.shape) * dtype.itemsize
        values = array(tile.shape, dtype, self._gatherer.memory(nbytes))
        for source in tile.sources:
            where = source.where
            view = values[tuple(map(slice, where.lo, where.hi))] if where.lo else values
            local = source.box.relative_to(source.chunk.box.lo)
            self._gatherer.fill_from(source.chunk.at, view, local, dtype)
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


def plan_jobs(
    wanted: Iterator[Sequence[Tile]],
) -> Iterator[Job[Sequence[Tile], PlanReader, PlannedPiece]]:
    """Yield the jobs that read some tiles each, planning several at a time."""
    while some := list(islice(map(plan_job, wanted), _PLANNED)):
        yield from some


def plan_job(tiles: Sequence[Tile]) -> Job[Sequence[Tile], PlanReader, PlannedPiece]:
    """Return the job that reads some tiles: all of a band, or one."""
    entry, pieces = tiles[0].entry, sum(len(tile.sources) or 1 for tile in tiles)
    is_moved = entry.source_dtype == entry.dtype and not is_computed(entry)
    is_small = is_moved or tiles[0].band == Box.whole(entry.shape)
    nbytes = sum(tile.nbytes for tile in tiles) // max(1, pieces) if is_small else LARGE
    return Job(tiles, lambda reader: reader.pieces(tiles), [partial(tile_runs, tiles)], nbytes)
