"""The chunks of a tensor that share elements with a box, computed once for all cut alike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ckptool.core.box import Box, BoxTable, hull, solid_places, spans_of
from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.core.chunks import chunks_of

_FEW = 1024
"""Boxes up to which tensors that are cut alike share an index, and common boxes that it keeps."""


SharedBox = tuple[int, Box, Box, Box]
"""The place of a box among many, and what it shares with another: in the coordinates of the tensor,
of the box at that place, and of the other.
"""


class BoxIndex:
    """Finds the boxes, of many, that share elements with a given one.

    ``whole_rows`` says that they are cut along the first dim only.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        spans = spans_of(boxes) if len(boxes) > 1 and boxes[0].lo else []
        solid = solid_places(boxes)
        self.whole_rows = all(len(set(dim_spans)) == 1 for dim_spans in spans[1:])
        dims = range(len(spans))
        self._dim = max(dims, key=lambda d: len(set(spans[d])), default=None)
        dim_spans = spans[self._dim] if self._dim is not None else []
        if dim_spans:
            solid.sort(key=dim_spans.__getitem__)
        self.boxes, self._order = boxes, solid
        self._starts = [dim_spans[at][0] for at in solid] if dim_spans else []
        self._ends_so_far = list(accumulate((dim_spans[at][1] for at in solid if dim_spans), max))
        self._cache: dict[Box, list[SharedBox]] = {}
        self._room = _FEW

    def find(self, box: Box) -> Iterable[SharedBox]:
        """Return what each box of the index shares with ``box``; of few boxes it is cached."""
        if len(self.boxes) > _FEW:
            return self._find(box)
        overlaps = self._cache.get(box)
        if overlaps is None:
            overlaps = list(self._find(box))
            self._room -= 1 + len(overlaps)
            if self._room >= 0:
                self._cache[box] = overlaps
        return overlaps

    def _find(self, box: Box) -> Iterator[SharedBox]:
        first, last = 0, len(self._order)
        if self._dim is not None:
            first = bisect_right(self._ends_so_far, box.lo[self._dim])
            last = bisect_left(self._starts, box.hi[self._dim])
        for at in self._order[first:last]:
            candidate = self.boxes[at]
            common = candidate.intersect(box)
            if common is not None:
                yield at, common, common.relative_to(candidate.lo), common.relative_to(box.lo)


def as_key(boxes: Sequence[Box]) -> Sequence[Box]:
    """Return boxes as a hashable key, which tensors that are cut alike share."""
    return boxes if isinstance(boxes, BoxTable) else tuple(boxes)


@lru_cache(maxsize=64)
def _shared_index(boxes: Sequence[Box]) -> BoxIndex:
    """Return the index of tensors that are cut alike."""
    return BoxIndex(tuple(boxes))


class Overlap(NamedTuple):
    """What a chunk shares with a box: ``box``, in the tensor's coordinates.

    ``local`` is the same in the chunk's own coordinates, ``where`` in those of the box to fill.
    """

    chunk: Chunk
    box: Box
    local: Box
    where: Box


class ChunkIndex:
    """Finds the chunks of one tensor that share elements with a box, as the same objects."""

    def __init__(self, entry: TensorEntry) -> None:
        boxes = chunks_of(entry).boxes
        is_small = len(boxes) <= _FEW
        self._boxes = _shared_index(as_key(boxes)) if is_small else BoxIndex(boxes)
        self.whole_rows = self._boxes.whole_rows
        self._chunks = entry.chunks
        self._opened: dict[int, Chunk] = {}

    def find(self, box: Box) -> Iterator[Overlap]:
        """Yield what each chunk that overlaps ``box`` shares with it."""
        for place, common, local, where in self._boxes.find(box):
            chunk = self._opened.get(place)
            if chunk is None:
                chunk = self._opened[place] = self._chunks[place]
            yield Overlap(chunk, common, local, where)

    def band(self, box: Box) -> tuple[set[int], Box]:
        """Return the indices of the chunks that overlap a box, and its rows as wide as they are."""
        places = {place for place, *_ in self._boxes.find(box)}
        around = hull([box, *map(self._boxes.boxes.__getitem__, places)])
        return places, Box((box.lo[0], *around.lo[1:]), (box.hi[0], *around.hi[1:]))
