"""The catalog of what a layout writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptool.core.box import row_major_strides
from ckptool.core.catalog import Chunk, Extent, TensorEntry, merge_copies
from ckptool.core.layout import Data, FileLayout, Layout, Scattered


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
