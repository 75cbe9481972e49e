"""Tensors that Megatron-core up to 0.15 stored reformulated, because ranks held flat ranges.

A tensor ``[X, Y]`` whose ranks hold ``[x, y]`` is stored as ``[X/x, Y/y, x*y]``, whose last dim the
data-parallel ranks cut anywhere (``sharded_tensor_to_torch_sharded_tensor``, 0.7 to 0.15). The
``mcore_data`` of ``.metadata`` keeps the shape ``[X, Y]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.core.view import pieces_of_run
from ckptool.errors import Damaged, Problem


def unflattened(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The tensor in its own ``shape``; Damaged where it is not stored reformulated from it."""
    grid = entry.shape[:-1]
    local = tuple(size // parts for size, parts in zip(shape, grid, strict=False))
    whole = tuple(size * parts for size, parts in zip(local, grid, strict=False))
    if len(grid) != len(shape) or whole != shape or math.prod(local) != entry.shape[-1]:
        raise Damaged(
            Problem(
                f"{entry.name}: stored as {list(entry.shape)}, which is no way to reformulate the"
                f" {list(shape)} that mcore_data states",
                "tensor-record",
            )
        )
    chunks = [piece for chunk in entry.chunks for piece in _pieces(entry, chunk, local)]
    return replace(entry, shape=shape, chunks=tuple(chunks))


def _pieces(entry: TensorEntry, chunk: Chunk, local: tuple[int, ...]) -> Iterator[Chunk]:
    """The boxes of a stored chunk, which is a flat range of one rank's part."""
    *cell, start = chunk.box.lo
    stop = chunk.box.hi[-1]
    if math.prod(chunk.box.shape[:-1]) != 1:
        raise Damaged(
            Problem(
                f"{entry.name}: chunk {chunk.box} spans several ranks' parts", "sharding-unknown"
            )
        )
    origin = tuple(index * size for index, size in zip(cell, local, strict=True))
    itemsize = entry.source_dtype.itemsize
    for box, at in pieces_of_run(chunk.at, chunk.box.shape, start, stop, local, itemsize):
        lo = tuple(index + first for index, first in zip(box.lo, origin, strict=True))
        yield Chunk(Box.at(lo, box.shape), at, chunk.rank)
