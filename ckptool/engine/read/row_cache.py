"""Whole rows of chunks, read once for the tiles that share them, and columns cut from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptool.core.box import contiguous, row_major_strides
from ckptool.core.catalog import Extent, Record
from ckptool.core.plan import Tile, TileSource
from ckptool.storage.local import SPAN, FileReader

NotePiece = Callable[[Record, int, memoryview], None]
"""Called with each piece of a checksummed record: the record, the file offset and the bytes."""

_NARROW = 512
"""Bytes of a row of a column block below which copying elements is faster than copying rows."""


class RowCache:
    """Rows of row-major chunks, for one thread: kept in ``buffer`` as long as there is room.

    ``note`` is called with the rows of checksummed records.
    """

    def __init__(self, reader: FileReader, note: NotePiece) -> None:
        self._reader = reader
        self._note = note
        self.buffer = memoryview(bytearray(SPAN))
        self._kept: dict[tuple[str, int, int], int] = {}
        self._used = 0
        self._cut = memoryview(b"")

    def forget(self) -> None:
        """Drop the kept rows: the next boxes are elsewhere."""
        self._kept.clear()
        self._used = 0

    def scratch(self, nbytes: int) -> memoryview:
        """Return memory for at most SPAN bytes; drops the kept rows."""
        self.forget()
        return self.buffer[:nbytes]

    def begin(self, at: Extent, start: int, nbytes: int) -> int:
        """Return where in ``buffer`` rows of the file are; reads them unless they are kept."""
        kept = self._kept.get((at.file, start, nbytes))
        if kept is not None:
            return kept
        if self._used + nbytes > SPAN:
            self.forget()
        begin = self._used
        view = self.buffer[begin : begin + nbytes]
        self._reader.read_into(at.file, start, view)
        self._kept[at.file, start, nbytes] = begin
        self._used += nbytes
        if at.record is not None:
            self._note(at.record, start, view)
        return begin

    def columns(self, tile: Tile) -> memoryview | None:
        """Return the bytes of a tile that is one block of wide columns; None if it is not.

        They are valid until the next call.
        """
        blocks = [_column(tile, source) for source in sorted(tile.sources, key=_first_row)]
        columns = [column for column in blocks if column is not None]
        if len(columns) < len(blocks) or not self._make_room(columns):
            return None
        import numpy as np

        nbytes, filled = sum(column.rows * column.width for column in columns), 0
        if nbytes > len(self._cut):
            self._cut = memoryview(bytearray(nbytes))
        for at, start, rows, row, skip, width in columns:
            begin, end = self.begin(at, start, rows * row), filled + rows * width
            kept = np.frombuffer(self.buffer, "u1", rows * row, begin).reshape(rows, row)
            cut = np.frombuffer(self._cut[filled:end], "u1").reshape(rows, width)
            cut[...] = kept[:, skip : skip + width]
            filled = end
        return self._cut[:nbytes]

    def _make_room(self, columns: list[_Column]) -> bool:
        """Return whether the rows of all columns fit together; drops others for them."""
        sizes = {(c.at.file, c.start, c.rows * c.row) for c in columns}
        if self._used + sum(size[2] for size in sizes - self._kept.keys()) > SPAN:
            self.forget()
        return sum(size[2] for size in sizes) <= SPAN


class _Column(NamedTuple):
    """``width`` bytes, after ``skip``, of each of ``rows`` rows of ``row`` bytes from ``start``."""

    at: Extent
    start: int
    rows: int
    row: int
    skip: int
    width: int


def _column(tile: Tile, source: TileSource) -> _Column | None:
    """Return the block of wide columns that fills rows of a tile; None if a source is none."""
    at, (low, _), (lo, _), wanted = source.chunk.at, source.chunk.box, source.box, source.box.shape
    if not isinstance(at, Extent) or at.ops or len(wanted) < 2:
        return None
    shape, itemsize = source.chunk.box.shape, tile.entry.source_dtype.itemsize
    row, step = row_major_strides(shape, itemsize)[:2]  # a dim of one index does not matter
    if wanted[2:] != shape[2:] or source.where.shape[1:] != tile.shape[1:]:
        return None
    if wanted[1] * step < _NARROW:
        return None
    if not contiguous(at.strides, shape, itemsize):
        return None
    start, skip = at.offset + (lo[0] - low[0]) * row, (lo[1] - low[1]) * step
    return _Column(at, start, wanted[0], row, skip, wanted[1] * step)


def _first_row(source: TileSource) -> int:
    return source.where.lo[0] if source.where.lo else 0
