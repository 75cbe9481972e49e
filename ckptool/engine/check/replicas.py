"""Compare the copies of a chunk that several ranks stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Copy, Item, Place, Scaled, TensorEntry, proved_equal
from ckptool.core.layout import tiles
from ckptool.errors import Problem
from ckptool.storage.local import Files

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Gatherer

_TILE = 1 << 20


def differing_replicas(entries: Iterable[TensorEntry], files: Files) -> list[Problem]:
    """One line for each replica whose values differ from the first rank's.

    Copies whose recorded checksums prove them equal are not read.
    """
    unproved = [
        (entry, chunk, copy)
        for entry in entries
        for chunk in entry.chunks
        for copy in chunk.copies
        if not proved_equal(chunk.at, copy.at)
    ]
    return [
        Problem(
            f"{entry.name} {chunk.box}: rank {chunk.rank} and rank {copy.rank} hold different"
            f" values of what should be one replicated tensor",
            "replicas-differ",
            file=copy.at.file,
            tensor=entry.name,
        )
        for entry, chunk, copy in _differing(unproved, files)
    ]


Replica = tuple[TensorEntry, Chunk, Copy]


def _differing(replicas: list[Replica], files: Files) -> list[Replica]:
    if not replicas:
        return []
    from ckptool.engine.read.gather import Gatherer

    gatherer = Gatherer(files)
    try:
        return [replica for replica in replicas if not _equal(gatherer, *replica)]
    finally:
        gatherer.close()


def _equal(gatherer: Gatherer, entry: TensorEntry, chunk: Chunk, copy: Copy) -> bool:
    whole = Box.whole(_distinct(chunk.box.shape, chunk.at, copy.at))
    for box in tiles(whole, entry.source_dtype.itemsize, _TILE):
        one, other = (_read(gatherer, entry, at, box) for at in (chunk.at, copy.at))
        if one != other:
            return False
    return True


def _distinct(shape: tuple[int, ...], one: Place, other: Place) -> tuple[int, ...]:
    """The shape without the dims along which both places repeat one element."""
    if isinstance(one, Item | Scaled) or isinstance(other, Item | Scaled):
        return shape
    pairs = zip(shape, one.strides, other.strides, strict=True)
    return tuple(min(n, 1) if a == b == 0 else n for n, a, b in pairs)


def _read(gatherer: Gatherer, entry: TensorEntry, at: Place, box: Box) -> memoryview:
    from ckptool.engine.read.gather import array, raw

    dtype = entry.source_dtype
    values = array(box.shape, dtype, memoryview(b""))
    gatherer.fill_from(at, values, box, dtype)
    return raw(values)
