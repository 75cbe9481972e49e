"""The content of tensors, whatever way they are sharded: SHA-256 of the row-major bytes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, TensorEntry, merge_copies
from ckptool.core.layout import Data, FileLayout, Layout, Scattered, tiles
from ckptool.core.plan import ChunkIndex
from ckptool.engine.gather import Array, Gatherer, raw, unit
from ckptool.engine.threads import share_jobs

_TILE = 1 << 20


def digests(
    entries: Iterable[TensorEntry],
    root: str,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of each tensor's stored elements in row-major order, by name.

    Bounded memory: tiles of a MiB a worker. The chunks must tile each tensor exactly.
    """
    found: dict[str, str] = {}

    def work(gatherer: Gatherer, entry: TensorEntry) -> None:
        found[entry.name] = _digest(entry, gatherer, progress)

    share_jobs(iter(list(entries)), workers, lambda: Gatherer(root), work)
    return found


def _digest(entry: TensorEntry, gatherer: Gatherer, progress: Callable[[int], None]) -> str:
    dtype = entry.source_dtype
    index = ChunkIndex(entry)
    total = hashlib.sha256()
    for tile in tiles(Box.whole(entry.shape), dtype.itemsize, _TILE):
        values: Array = np.empty(tile.shape, unit(dtype.itemsize))
        for chunk, common in index.find(tile):
            where = common.relative_to(tile.lo)
            view = values[tuple(map(slice, where.lo, where.hi))] if where.lo else values
            gatherer.fill(view, chunk, common, dtype)
        total.update(raw(values))
        progress(values.nbytes)
    return total.hexdigest()


def written_entries(layout: Layout, sources: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """What a layout puts where, as the catalog of its own output, replicas as copies.

    ``sources`` are the entries that are wanted, of those the layout was made from.
    """
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for file in layout.files:
        offset = 0
        for part in file.parts:
            if isinstance(part, Data | Scattered) and part.name in sources:
                chunks[part.name] += _written_chunks(file, offset, part)
            offset += part.nbytes
    return {name: _written(sources[name], merge_copies(found)) for name, found in chunks.items()}


def _written_chunks(file: FileLayout, offset: int, part: Data | Scattered) -> Iterator[Chunk]:
    strides = row_major_strides(part.shape, part.itemsize)
    for box, local in part.pieces:
        start = offset + sum(i * s for i, s in zip(local.lo, strides, strict=True))
        yield Chunk(box, Extent(file.path, start, strides), file.rank or 0)


def _written(source: TensorEntry, chunks: tuple[Chunk, ...]) -> TensorEntry:
    return TensorEntry(source.name, source.path, source.dtype, source.shape, chunks)
