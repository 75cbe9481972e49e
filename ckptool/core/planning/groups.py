"""Parts of output files that are written together, and the tiles that they are cut into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import add, sub

from msgspec import Struct

from ckptool.core.box import Box, Piece, hull
from ckptool.core.casts import computed_places
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import Data, tiles
from ckptool.core.sharding.index import ChunkIndex, Overlap
from ckptool.errors import Damaged

_SMALL = 1 << 18
"""Bytes of a tensor up to which it is read whole for all of its parts, with others."""
_BAND = 4 << 20
"""Bytes of the source's rows that are read at once to cut columns out of them."""
_LARGE = 4
"""Times as large as others are tiles of whole rows, copied or computed piece by piece."""


class Tile(Struct, frozen=True):
    """A range of an output file: a C-ordered array of ``shape`` at byte ``offset``.

    It is filled from ``sources``, the parts of it that chunks hold; or from ``pieces`` of a
    ``band`` of the tensor, which is read once for all tiles of the job: ``sources`` is then empty.
    """

    file: int
    part: int
    offset: int
    shape: tuple[int, ...]
    entry: TensorEntry
    sources: tuple[Overlap, ...]
    pieces: tuple[Piece, ...] = ()
    band: Box | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the output file."""
        return math.prod(self.shape) * self.entry.dtype.itemsize


class LayoutPart(Struct, frozen=True):
    """A tensor part of a file: file ``file`` of the layout, part ``position``, byte ``offset``."""

    file: int
    position: int
    offset: int
    part: Data


class Group(Struct, frozen=True):
    """Parts that are cut out of a ``band`` of the tensor, which is read once for all of them.

    ``rows`` rows are read at a time, a tile of each part; or, of a small tensor, all ``at_once``.
    A single part may have no band; its tiles are then ``times`` as large as the limit.
    """

    parts: tuple[LayoutPart, ...]
    rows: int = 0
    band: Box | None = None
    times: int = 1

    @property
    def at_once(self) -> bool:
        """Whether the band is the whole tensor, of which each part is one tile."""
        return self.band is not None and not self.rows


def is_small(entry: TensorEntry, limit: int) -> bool:
    """Return whether a tensor is read whole for all of its parts, as tiles of ``limit`` bytes."""
    itemsize = max(entry.source_dtype.itemsize, entry.dtype.itemsize)
    return 0 < entry.elements * itemsize <= min(limit, _SMALL)


def are_small(tiles: Sequence[Tile]) -> bool:
    """Return whether the tiles of a job are all of one small tensor, or of several."""
    entry = tiles[0].entry
    return tiles[0].band == Box.whole(entry.shape) and is_small(entry, _SMALL)


def rows_of(place: LayoutPart) -> object:
    """Return the key shared by the parts of one group: the tensor and its rows."""
    box = _hull_of(place.part)
    if box is not None and len(box.lo) > 1 and box.volume:
        return place.part.name, box.lo[0], box.hi[0]
    return place.file, place.position


def _hull_of(part: Data) -> Box | None:
    """Return the smallest box of the tensor around a part; None if its rows are scattered."""
    if len(part.pieces) == 1:
        return part.pieces[0].box
    boxes = [piece.box for piece in part.pieces]
    if not (boxes and part.shape) or len({(b.lo[0], b.hi[0]) for b in boxes}) > 1:
        return None
    box = hull(boxes)
    return box if box.shape[0] == part.shape[0] else None


def group_of_rows(
    place: LayoutPart, entry: TensorEntry, index: ChunkIndex, nbytes: int
) -> Group | None:
    """Return a part as it is cut out of whole rows of its chunks, ``nbytes`` at a time.

    None if the rows are the part's own, larger than ``nbytes``, or scattered.
    """
    part, box = place.part, _hull_of(place.part)
    row = math.prod(entry.shape[1:]) * part.itemsize
    if box is None or part.shape[1:] == entry.shape[1:] or not 0 < row <= nbytes:
        return None
    if not box.volume:
        return None
    return Group((place,), nbytes // row, index.band(box)[1])


def tiles_of_group(
    group: Group, entry: TensorEntry, index_of: Callable[[TensorEntry], ChunkIndex], limit: int
) -> Iterator[list[Tile]]:
    """Yield the tiles of a group, in order; those that are read together at a time."""
    band = group.band
    if group.at_once:
        yield [
            Tile(at.file, at.position, at.offset, at.part.shape, entry, (), at.part.pieces, band)
            for at in group.parts
        ]
    elif band is not None:
        yield from _tiles_of_rows(group, entry, band)
    else:
        for tile in _tiles_of(group.parts[0], entry, index_of(entry), limit * group.times):
            yield [tile]


def group_parts(
    places: list[LayoutPart], entry: TensorEntry, index: ChunkIndex, limit: int
) -> list[Group]:
    """Return a group for all parts that are cut out of the same chunks.

    A part has its own group if it has chunks of its own, or a row of the chunks exceeds a tile.
    """
    computed = computed_places(entry)
    is_moved = entry.source_dtype == entry.dtype and not computed
    in_pieces = computed and all(at.in_pieces for at in computed)
    straight = entry.shape[1:] if is_moved and index.whole_rows else None
    most = min(4 * limit, _BAND) if is_moved else limit
    itemsize = max(entry.source_dtype.itemsize, entry.dtype.itemsize)
    groups = []
    for parts, band in _bands(places, index) if len(places) > 1 else [(places, None)]:
        row = math.prod(band.shape[1:]) * itemsize if band is not None else 0
        if len(parts) > 1 and row <= most:
            groups.append(Group(tuple(parts), most // row, band))
            continue
        for place in parts:
            is_large = in_pieces or place.part.shape[1:] == straight
            groups.append(Group((place,), times=_LARGE if is_large else 1))
    return groups


def _bands(places: list[LayoutPart], index: ChunkIndex) -> list[tuple[list[LayoutPart], Box]]:
    """Return parts of the same rows in sets that share no chunk, each with its band."""
    bands: list[tuple[set[int], Box, list[LayoutPart]]] = []
    for place in places:
        box, parts, rest = _hull_of(place.part), [place], []
        if box is None:
            raise TypeError(f"{place.part.name}: a part of scattered rows")
        chunks, band = index.band(box)
        if index.whole_rows:
            return [(places, band)]
        for other in bands:
            if chunks.isdisjoint(other[0]):
                rest.append(other)
                continue
            chunks, band = chunks | other[0], hull([band, other[1]])
            parts = other[2] + parts
        bands = [*rest, (chunks, band, parts)]
    return [(parts, band) for _, band, parts in bands]


def _tiles_of_rows(group: Group, entry: TensorEntry, band: Box) -> Iterator[list[Tile]]:
    """Yield a tile of each part of a group, ``group.rows`` rows of the band at a time."""
    (first, *low), (end, *high) = band
    for at in range(0, end - first, group.rows):
        rows = min(group.rows, end - first - at)
        step = Box((first + at, *low), (first + at + rows, *high))
        if at == 0 or rows < group.rows:
            cuts = [_rows_cut(place.part, band, rows) for place in group.parts]
        yield [
            Tile(to.file, to.position, to.offset + at * row, shape, entry, (), pieces, step)
            for to, (row, shape, pieces) in zip(group.parts, cuts, strict=True)
        ]


def _rows_cut(part: Data, band: Box, rows: int) -> tuple[int, tuple[int, ...], tuple[Piece, ...]]:
    """Return the bytes of a row of a part, and the shape and the pieces of ``rows`` of its rows."""
    shape = (rows, *part.shape[1:])
    row = math.prod(shape[1:]) * part.itemsize
    return row, shape, _pieces_of_rows(part.pieces, band.lo[1:], rows)


@lru_cache(maxsize=64)
def _pieces_of_rows(
    pieces: tuple[Piece, ...], low: tuple[int, ...], rows: int
) -> tuple[Piece, ...]:
    """Return the pieces of ``rows`` rows of a part, in a band whose other dims begin at ``low``.

    Cached, since the layers of a model are cut alike.
    """
    result = []
    for (lo, hi), local in pieces:
        band_box = Box((0, *map(sub, lo[1:], low)), (rows, *map(sub, hi[1:], low)))
        result.append(Piece(band_box, Box((0, *local.lo[1:]), (rows, *local.hi[1:]))))
    return tuple(result)


def _tiles_of(
    place: LayoutPart, entry: TensorEntry, index: ChunkIndex, limit: int
) -> Iterator[Tile]:
    part, offset = place.part, place.offset
    shape = part.shape
    pieces = [(inner, tuple(map(sub, whole.lo, inner.lo))) for whole, inner in part.pieces]
    for local in tiles(Box.whole(shape), part.itemsize, limit):
        sources = tuple(_sources(local, pieces, index))
        volume = local.volume
        if sum([source.box.volume for source in sources]) != volume:
            raise Damaged(f"{entry.name}: {local} of a local tensor {list(shape)} is not covered")
        yield Tile(place.file, place.position, offset, local.shape, entry, sources)
        offset += volume * part.itemsize


def _sources(
    local: Box, pieces: list[tuple[Box, tuple[int, ...]]], index: ChunkIndex
) -> Iterator[Overlap]:
    """Yield the sources that fill a box of a local tensor.

    ``pieces`` are boxes of the local tensor, each with its shift to the global tensor.
    """
    for inner, shift in pieces:
        common = local.intersect(inner) if local.lo else inner
        if common is None:
            continue
        global_box = Box(tuple(map(add, common.lo, shift)), tuple(map(add, common.hi, shift)))
        origin = tuple(map(add, local.lo, shift))
        for chunk, box, inside, _ in index.find(global_box):
            yield Overlap(chunk, box, inside, box.relative_to(origin))
