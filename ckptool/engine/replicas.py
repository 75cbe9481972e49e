"""Compare the copies of a chunk that several ranks stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Copy, Extent, Place, TensorEntry
from ckptool.core.layout import tiles

if TYPE_CHECKING:
    from ckptool.engine.gather import Gatherer

_TILE = 1 << 20


def differing_replicas(entries: Iterable[TensorEntry], root: str) -> list[str]:
    """One line for each replica whose values differ from the first rank's.

    Copies whose recorded checksums prove them equal are not read.
    """
    unproved = [
        (entry, chunk, copy)
        for entry in entries
        for chunk in entry.chunks
        for copy in chunk.copies
        if not _proved_equal(chunk.at, copy.at)
    ]
    return [
        f"{entry.name} {chunk.box}: rank {chunk.rank} and rank {copy.rank} hold different"
        f" values of what should be one replicated tensor"
        for entry, chunk, copy in _differing(unproved, root)
    ]


Replica = tuple[TensorEntry, Chunk, Copy]


def _differing(replicas: list[Replica], root: str) -> list[Replica]:
    if not replicas:
        return []
    from ckptool.engine.gather import Gatherer

    gatherer = Gatherer(root)
    try:
        return [replica for replica in replicas if not _equal(gatherer, *replica)]
    finally:
        gatherer.close()


def _proved_equal(one: Place, other: Place) -> bool:
    if not isinstance(one, Extent) or not isinstance(other, Extent):
        return False
    a, b = one.record, other.record
    if a is None or b is None:
        return False
    same_bytes = (a.crc32, a.nbytes) == (b.crc32, b.nbytes)
    spots = (
        (one.offset - a.offset, one.strides, one.ops),
        (other.offset - b.offset, other.strides, other.ops),
    )
    return same_bytes and spots[0] == spots[1]


def _equal(gatherer: Gatherer, entry: TensorEntry, chunk: Chunk, copy: Copy) -> bool:
    whole = Box.whole(chunk.box.shape)
    for box in tiles(whole, entry.source_dtype.itemsize, _TILE):
        one, other = (_read(gatherer, entry, at, box) for at in (chunk.at, copy.at))
        if one != other:
            return False
    return True


def _read(gatherer: Gatherer, entry: TensorEntry, at: Place, box: Box) -> memoryview:
    from ckptool.engine.gather import array, raw

    dtype = entry.source_dtype
    values = array(box.shape, dtype, memoryview(b""))
    gatherer.fill_from(at, values, box, dtype)
    return raw(values)
