"""Read the tiles of a plan as they are to be written: read, check, gather, cast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.casts import is_computed
from ckptool.core.catalog import Chunk, Extent, TensorEntry, stored_places
from ckptool.core.planning.groups import Tile, are_small
from ckptool.core.sharding.index import Overlap
from ckptool.engine.checksum import RecordCheck, crc32, crc32_combine
from ckptool.engine.read.byte_reader import join
from ckptool.engine.read.containers import open_chunk, open_overlaps
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.segments import Segment, segments_of, segments_of_tensor, tile_needs
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tensors import TensorReader
from ckptool.engine.read.tiles import LARGE, SMALL, Job
from ckptool.errors import Damaged
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.engine.read.numbers import Array

_NAME_OF = attrgetter("entry.name")
_WIDEST = 16
"""Bytes of the widest element: a complex number of two of 64 bits."""


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


class PlannedPiece(Struct, frozen=True):
    """Bytes of a tile in the form to be written, at the offset ``skip``."""

    tile: Tile
    skip: int
    data: memoryview
    crc: int

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        return len(self.data)


class PlanReader(TensorReader):
    """Reads tiles of a plan for one thread.

    Tiles of straight runs of bytes are read piece by piece; those of a band are cut from it, others
    are gathered. Numpy is imported only on demand. All pieces of checksummed records are noted in
    ``records``, and all that is read in ``sums``.
    """

    def __init__(self, source: Files, records: RecordCheck, sums: ReadSums | None = None) -> None:
        super().__init__(source, records.note, sums, None if sums is None else RangeCheck())
        self._records = records
        self._tile = memoryview(b"")  # beside ``memory``, which holds what tiles are cut from

    def pieces(self, tiles: Sequence[Tile]) -> Iterator[PlannedPiece]:
        """Read the tiles of a job, each piece valid until the next."""
        if tiles[0].band is not None:
            of_band = self._small(tiles) if are_small(tiles) else self._cut(tiles, tiles[0].band)
            for tile, data in of_band:
                yield PlannedPiece(tile, 0, data, crc32(data))
            return
        for tile in tiles:
            entry, overlaps = tile.entry, open_overlaps(tile.sources)
            segments = None
            if entry.source_dtype == entry.dtype:
                segments = segments_of(overlaps, tile.shape, entry.dtype.itemsize)
            if segments is None:
                data = self._data(tile, overlaps)
                yield PlannedPiece(tile, 0, data, crc32(data))
                continue
            self._touch(entry, overlaps)
            for segment in segments:
                yield from self._copy(tile, segment)

    def _cut(self, tiles: Sequence[Tile], band: Box) -> Iterator[tuple[Tile, memoryview]]:
        """Read a band of a tensor, and cut tiles from it, each valid until the next."""
        from ckptool.engine.read.gather import cut

        entry = tiles[0].entry
        overlaps = self.elements.find(entry, band)
        # else memory that no chunk fills would be written with what was in it before
        if sum(overlap.box.volume for overlap in overlaps) != band.volume:
            raise Damaged(f"{entry.name}: {band} is not covered")
        values = self._gather(entry, band.shape, overlaps)
        self._note_made(entry, [(band, values)])
        for tile in tiles:
            yield tile, cut(values, tile, self._tile_memory(tile.nbytes))

    def _small(self, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, memoryview]]:
        """Read small tensors, and cut tiles from each, each valid until the next.

        Tensors that are stored as rows of the type to be written are read together, and cut
        together if their tiles are the same parts of them.
        """
        straight, scattered = list[tuple[list[Tile], list[Segment]]](), list[list[Tile]]()
        for group in (list(run) for _, run in groupby(tiles, _NAME_OF)):
            entry = group[0].entry
            rows = segments_of_tensor(entry) if entry.source_dtype is entry.dtype else None
            if rows is None:
                scattered.append(group)
            else:
                straight.append((group, rows))
        stored = iter(self.read_close(row[:3] for _, rows in straight for row in rows))
        by_kind = dict[object, list[tuple[list[Tile], memoryview]]]()
        for group, rows in straight:
            entry, parts = group[0].entry, [*islice(stored, len(rows))]
            for (_, offset, _, record, _), data in zip(rows, parts, strict=True):
                if record is not None:
                    self._records.touch(record, entry.name)
                    self._records.note(record, offset, data)
            # by identity, which is quick: tensors that are cut alike share their pieces
            kind = entry.shape, entry.dtype.name, *(id(tile.pieces) for tile in group)
            by_kind.setdefault(kind, []).append((group, join(parts)))
        pieces = chain.from_iterable(map(_cut_alike, by_kind.values()))
        # in the order of the files: what adjoins there is then written at once
        yield from sorted(pieces, key=lambda piece: (piece[0].file, piece[0].part))
        for group in scattered:
            yield from self._cut(group, Box.whole(group[0].entry.shape))

    def _tile_memory(self, nbytes: int) -> memoryview:
        """Return memory for a tile, which the next call may return again."""
        if nbytes > len(self._tile):
            self._tile = memoryview(bytearray(nbytes))
        return self._tile

    def _touch(self, entry: TensorEntry, overlaps: Iterable[Overlap]) -> None:
        """Note the records that a tensor's opened chunks are made from."""
        for overlap in overlaps:
            touch(self._records, entry, overlap.chunk)

    def _copy(self, tile: Tile, segment: Segment) -> Iterator[PlannedPiece]:
        """Read a segment in pieces that fit the processor's cache."""
        file, offset, nbytes, record, skip = segment
        pieces, total = max(1, -(-nbytes // self.policy.tile)), 0
        # pieces of one size, in whole elements
        step = max(1, -(-nbytes // (pieces * _WIDEST))) * _WIDEST
        for done in range(0, nbytes, step):
            data = self.read(file, offset + done, min(step, nbytes - done))
            crc = crc32(data)
            # joined from those of the pieces, which the writer needs, too: nothing is hashed twice
            total = crc32_combine(total, crc, len(data))
            yield PlannedPiece(tile, skip + done, data, crc)
        if record is not None:
            self._records.piece(record, offset, nbytes, total)

    def _data(self, tile: Tile, overlaps: Sequence[Overlap]) -> memoryview:
        """Return the bytes of a tile in the form to be written."""
        from ckptool.engine.read.gather import raw
        from ckptool.engine.read.numbers import part_of

        values = self._gather(tile.entry, tile.shape, overlaps)
        boxes = ((overlap.box, part_of(values, overlap.where)) for overlap in overlaps)
        self._note_made(tile.entry, boxes)
        return raw(values)

    def _gather(
        self, entry: TensorEntry, shape: tuple[int, ...], overlaps: Sequence[Overlap]
    ) -> Array:
        """Return an array of the elements that chunks hold, in the type to be written."""
        from ckptool.engine.read.gather import array

        self._touch(entry, overlaps)
        stored = entry.source_dtype
        values = array(shape, stored, self.memory(math.prod(shape) * stored.itemsize))
        self.elements.fill(values, entry, overlaps)
        return self.elements.convert(entry, values)

    def _note_made(self, entry: TensorEntry, boxes: Iterable[tuple[Box, Array]]) -> None:
        """Note boxes of a tensor that is cast or computed, as they are to be written."""
        if self._sums is None or self._ranges is None:
            return
        if entry.source_dtype == entry.dtype and not is_computed(entry):
            return
        from ckptool.engine.read.gather import bits_of

        losses = self._ranges.take()
        for box, values in boxes:
            self._sums.note_made(entry.name, box, bits_of(values), losses)
            losses = ()  # counted of all boxes together


def _cut_alike(
    tensors: Sequence[tuple[Sequence[Tile], memoryview]],
) -> Iterator[tuple[Tile, memoryview]]:
    """Yield the tiles of small tensors that are cut alike; tiles of whole rows without numpy."""
    (first, whole), stack = tensors[0], None
    for at, tile in enumerate(first):
        rows = _rows_of(tile, len(whole))
        if rows is not None:
            yield from ((tiles[at], data[rows]) for tiles, data in tensors)
            continue
        from ckptool.engine.read.gather import array, cut

        if stack is None:
            joined = memoryview(b"".join([data for _, data in tensors]))
            stack = array((len(tensors), *tile.entry.shape), tile.entry.dtype, joined)
        size = tile.nbytes
        parts = cut(stack, tile, memoryview(bytearray(size * len(tensors))))
        for (tiles, _), start in zip(tensors, range(0, len(parts), size), strict=True):
            yield tiles[at], parts[start : start + size]


def _rows_of(tile: Tile, nbytes: int) -> slice | None:
    """Return the range of a tensor's ``nbytes`` that a tile is; None if it is not whole rows."""
    box, shape = tile.pieces[0].box, tile.entry.shape
    if len(tile.pieces) > 1 or tile.shape != box.shape or tile.shape[1:] != shape[1:]:
        return None
    row = nbytes // shape[0] if shape else 0
    return slice(box.lo[0] * row, box.hi[0] * row) if shape else slice(None)


def plan_job(tiles: Sequence[Tile]) -> Job[Sequence[Tile], PlanReader, PlannedPiece]:
    """Return the job that reads some tiles: all of a band, or of small tensors, or one."""
    entry, nbytes = tiles[0].entry, LARGE
    if are_small(tiles):
        nbytes = SMALL
    elif entry.source_dtype == entry.dtype and not is_computed(entry):
        pieces = sum(len(tile.sources) or 1 for tile in tiles)
        nbytes = sum(tile.nbytes for tile in tiles) // max(1, pieces)
    return Job(tiles, lambda reader: reader.pieces(tiles), [partial(tile_needs, tiles)], nbytes)
