"""What lies in the buckets of Megatron's distributed optimizer besides parameters' state.

A bucket of ``dp_reshardable`` is a 1-d tensor ``[chained_K.]optimizer.distributed``
``.dp_group_idx_G.gbuf_idx_N.dtype_(PARAM, GRAD).bucket_idx_B.STATE``, whose chunks are parameters'
pieces and the padding between them (megatron-core 0.7 to 0.20).
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.formats._megatron_buffers import ALIGNMENT

BUCKET = re.compile(
    r"(?:chained_([0-9]{1,3})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,7})"
    r"\.gbuf_idx_([0-9]{1,4})\.dtype_(.+)\.bucket_idx_([0-9]{1,7})\.(\w+)"
)


def is_bucket(name: str) -> bool:
    """Whether a tensor is a bucket of the distributed optimizer."""
    return BUCKET.fullmatch(name) is not None


def without_padding(entry: TensorEntry) -> TensorEntry:
    """A bucket with its padding taken out; any other tensor as it is.

    Megatron saves padding as memory happens to hold it (``torch.empty``), NaN included.
    """
    if len(entry.shape) != 1 or not is_bucket(entry.name):
        return entry
    kept: list[Chunk] = []
    size = 0
    for chunk in _parameters(sorted(entry.chunks, key=lambda chunk: chunk.box.lo)):
        stop = size + chunk.box.volume
        kept.append(replace(chunk, box=Box((size,), (stop,))))
        size = stop
    return replace(entry, shape=(size,), chunks=tuple(kept))


def _parameters(chunks: list[Chunk]) -> list[Chunk]:
    """The chunks that are parameters' pieces, of chunks in order.

    What begins between two multiples of the alignment, behind a chunk of the same rank or behind
    padding, is padding: a parameter goes on there only where another rank's part begins.
    """
    kept: list[Chunk] = []
    before: Chunk | None = None
    padding = False
    for chunk in chunks:
        follows = before is not None and before.box.hi == chunk.box.lo
        same_rank = before is not None and before.rank == chunk.rank
        padding = bool(chunk.box.lo[0] % ALIGNMENT) and follows and (same_rank or padding)
        if not padding:
            kept.append(chunk)
        before = chunk
    return kept
