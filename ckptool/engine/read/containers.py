"""Containers that are opened when their elements are read: what to fetch, and where these are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from ckptool.core.catalog import Chunk, Container, Extent, Opening, Place
from ckptool.core.sharding.index import Overlap
from ckptool.storage.files import ReadSpan

Need = ReadSpan | Opening
"""Bytes that are read, or something to open first, once for all readers."""


def open_place(at: Place, shape: tuple[int, ...]) -> Place:
    """Return where the elements of a chunk of ``shape`` are; opens its container."""
    if isinstance(at, Container) and at.opening is not None:
        return at.opening.place(at, shape)
    return at


def open_chunk(chunk: Chunk) -> Chunk:
    """Return a chunk whose elements can be read."""
    at = open_place(chunk.at, chunk.box.shape)
    return chunk if at is chunk.at else replace(chunk, at=at)


def open_overlaps(overlaps: Sequence[Overlap]) -> Sequence[Overlap]:
    """Return the same overlaps, of chunks whose elements can be read."""
    if not any(isinstance(overlap.chunk.at, Container) for overlap in overlaps):
        return overlaps
    return [overlap._replace(chunk=open_chunk(overlap.chunk)) for overlap in overlaps]


def likely_place(at: Place, itemsize: int) -> Place:
    """Return the likely place of elements that are opened later; any other place unchanged."""
    if not isinstance(at, Container) or at.opening is None or at.part is None:
        return at
    start, steps = at.part.start * itemsize, (step * itemsize for step in at.part.strides)
    return Extent(at.file, at.opening.start + start, tuple(steps))


def openings(at: Place) -> Iterator[Opening]:
    """Yield what must be opened before elements at a place are read."""
    if isinstance(at, Container) and at.opening is not None:
        yield at.opening


def runs_of(needs: Iterable[Need], opened: set[Opening]) -> Iterator[ReadSpan]:
    """Yield the bytes that are read, also to open containers, except those ``opened`` before."""
    for need in needs:
        if isinstance(need, tuple):
            yield need
        elif need not in opened:
            opened.add(need)
            yield from need.edges
