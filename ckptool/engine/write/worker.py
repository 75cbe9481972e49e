"""What one thread of a transfer does: read, check, gather, cast and write tiles."""

from __future__ import annotations

import math
import os
from functools import cached_property
from operator import mul, sub
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.core.catalog import Extent, Record, contiguous, stored_places
from ckptool.core.plan import Source, Tile
from ckptool.engine.checksum import crc32, joined
from ckptool.engine.read.records import RecordCheck
from ckptool.engine.read.row_cache import Rows
from ckptool.errors import TransferError
from ckptool.storage.disk import open_unfollowed
from ckptool.storage.local import Files

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Array, Gatherer

_WRITE = 1 << 19
"""Bytes of one write, while the processor's cache holds them."""
_MOST_OPEN = 32

Run = tuple[Extent, int, int, int]
"""A run of bytes: its place, file offset, offset in a tile and length."""


def run_of(tile: Tile, source: Source) -> Run | None:
    """The run of bytes that one source of a tile is, or None where it is not one as it lies."""
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


def touch(records: RecordCheck, tile: Tile) -> None:
    """Note which records a tile is made from."""
    for source in tile.sources:
        for at in stored_places(source.chunk.at):
            if isinstance(at, Extent) and at.record is not None:
                records.touch(at.record, tile.entry.name)


class Worker:
    """The descriptors and buffers of one thread.

    Tiles of straight runs of bytes are copied piece by piece, wide columns are joined from rows
    that are read once; others are gathered by numpy, which is only then imported. ``records`` is
    told of all pieces of checksummed records that are read.
    """

    def __init__(self, source: Files, folder: Path, records: RecordCheck) -> None:
        self._source = source
        self._folder = folder
        self._records = records
        self._reader = source.reader()
        self._buffer = memoryview(bytearray(source.tile))
        self._open: dict[str, int] = {}

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self._reader, self._note)

    @cached_property
    def _gatherer(self) -> Gatherer:
        from ckptool.engine.read.gather import Gatherer

        return Gatherer(self._source, self._note)

    def write_tile(self, tile: Tile, path: str, *, shared: bool) -> int:
        """Write a tile into the output file ``path``, and return the CRC-32 of its bytes.

        ``shared`` says that further tiles will need the same rows of the source.
        """
        straight = self._straight(tile)
        if len(straight) == len(tile.sources) and tile.entry.source_dtype == tile.entry.dtype:
            return joined(
                [(run[2], run[3], self._copy(run, path, tile.offset)) for run in straight]
            )
        data = self._bytes_of(tile, straight, shared=shared)
        self._write(path, tile.offset, data)
        return crc32(data)

    def data(self, tile: Tile) -> memoryview:
        """The bytes of a tile as they are to be written, until the next tile is asked for."""
        return self._bytes_of(tile, self._straight(tile), shared=False)

    def forget_rows(self) -> None:
        """The tiles to come share no rows of the source with those before."""
        if "_gatherer" in self.__dict__:
            self._gatherer.forget()
        if "_rows" in self.__dict__:
            self._rows.forget()

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
        if "_gatherer" in self.__dict__:
            self._gatherer.close()
        self._close_outputs()

    def _straight(self, tile: Tile) -> list[Run]:
        """The sources of a tile that are runs of bytes as they lie; its records are noted."""
        touch(self._records, tile)
        runs = (run_of(tile, source) for source in tile.sources)
        return [run for run in runs if run is not None]

    def _copy(self, run: Run, path: str, offset: int) -> int:
        """Copy a run of bytes into the tile at ``offset`` of an output file; its CRC-32."""
        at, start, skip, nbytes = run
        crc, step = 0, min(self._source.piece, len(self._buffer))
        for done in range(0, nbytes, step):
            piece = self._buffer[: min(step, nbytes - done)]
            self._reader.read_into(at.file, start + done, piece)
            crc = crc32(piece, crc)
            self._write(path, offset + skip + done, piece)
        if at.record is not None:
            self._records.piece(at.record, start, nbytes, crc)
        return crc

    def _bytes_of(self, tile: Tile, straight: list[Run], *, shared: bool) -> memoryview:
        """The bytes of a tile as they are to be written; its ``straight`` runs are noted."""
        if shared and tile.entry.source_dtype == tile.entry.dtype:
            data = self._rows.columns(tile)
            if data is not None:
                return memoryview(data)
        return self._gathered_bytes(tile, straight, shared=shared)

    def _gathered_bytes(self, tile: Tile, straight: list[Run], *, shared: bool) -> memoryview:
        from ckptool.engine.read.gather import raw

        values = self._gathered(tile, shared=shared)
        data = raw(values)
        for at, start, skip, nbytes in straight:
            if at.record is not None:
                piece = data[skip : skip + nbytes]
                self._records.piece(at.record, start, nbytes, crc32(piece))
        return raw(self._target_values(tile, values))

    def _target_values(self, tile: Tile, values: Array) -> Array:
        """The gathered values in the element type that is written."""
        from ckptool.engine.read.rounding import cast

        if tile.entry.source_dtype == tile.entry.dtype:
            return values
        return cast(values, tile.entry.source_dtype, tile.entry.dtype)

    def _gathered(self, tile: Tile, *, shared: bool) -> Array:
        """The tile's elements, in the source's element type, in an array of the tile's shape."""
        from ckptool.engine.read.gather import array

        dtype = tile.entry.source_dtype
        values = array(tile.shape, dtype, self._buffer)
        for source in tile.sources:
            where = source.where
            view = values[tuple(map(slice, where.lo, where.hi))] if where.lo else values
            self._gatherer.fill(view, source.chunk, source.box, dtype, shared=shared)
        return values

    def _note(self, record: Record, offset: int, data: memoryview) -> None:
        self._records.piece(record, offset, len(data), crc32(data))

    def _write(self, path: str, offset: int, data: memoryview) -> None:
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= _MOST_OPEN:
                self._close_outputs()
            descriptor = open_unfollowed(Path(f"{self._folder}/{path}"), os.O_WRONLY)
            self._open[path] = descriptor
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(descriptor, data[done : done + _WRITE], offset + done)
            except OSError as error:
                raise TransferError(f"{path}: {error.strerror} at byte {offset + done:,}") from None

    def _close_outputs(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
