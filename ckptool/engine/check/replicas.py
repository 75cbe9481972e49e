"""Compare the copies of a chunk that several ranks stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Chunk,
    Container,
    Copy,
    Place,
    ScaledBlocks,
    TensorEntry,
    proved_equal,
)
from ckptool.core.layout import tiles
from ckptool.engine.read.tiles import Job, read_tiles
from ckptool.errors import Problem
from ckptool.storage.local import Files

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Gatherer
    from ckptool.engine.read.tensors import PairTile

_TILE = 1 << 20


def differing_replicas(entries: Iterable[TensorEntry], files: Files) -> list[Problem]:
    """Return a problem for each replica whose values differ from the first rank's.

    Copies whose recorded checksums prove them equal are not read.
    """
    replicas = [
        (entry, chunk, copy)
        for entry in entries
        for chunk in entry.chunks
        for copy in chunk.copies
        if not proved_equal(chunk.at, copy.at)
    ]
    if not replicas:
        return []  # without numpy, which takes long to import
    from ckptool.engine.read.gather import raw
    from ckptool.engine.read.tensors import TensorSource

    differing: set[int] = set()

    def compare(position: int, tiles: Iterator[PairTile]) -> None:
        if any(raw(tile.one) != raw(tile.other) for tile in tiles):
            differing.add(position)

    jobs = (Job(i, partial(_read_both, *replica)) for i, replica in enumerate(replicas))
    read_tiles(TensorSource(files), jobs, compare, 1)
    return [
        Problem(
            f"{entry.name} {chunk.box}: rank {chunk.rank} and rank {copy.rank} hold different"
            f" values of what should be one replicated tensor",
            "replicas-differ",
            file=copy.at.file,
            tensor=entry.name,
        )
        for entry, chunk, copy in (replicas[position] for position in sorted(differing))
    ]


def _read_both(
    entry: TensorEntry, chunk: Chunk, copy: Copy, gatherer: Gatherer
) -> Iterator[PairTile]:
    from ckptool.engine.read.tensors import PairTile, read_place

    dtype = entry.source_dtype
    whole = Box.whole(_without_repeats(chunk.box.shape, chunk.at, copy.at))
    for box in tiles(whole, dtype.itemsize, _TILE):
        one, other = (read_place(gatherer, at, box, dtype) for at in (chunk.at, copy.at))
        yield PairTile(box, one, other, one.nbytes + other.nbytes)


def _without_repeats(shape: tuple[int, ...], one: Place, other: Place) -> tuple[int, ...]:
    """Return the shape without the dims along which both places repeat one element."""
    if isinstance(one, Container | ScaledBlocks) or isinstance(other, Container | ScaledBlocks):
        return shape
    pairs = zip(shape, one.strides, other.strides, strict=True)
    return tuple(min(n, 1) if a == b == 0 else n for n, a, b in pairs)
