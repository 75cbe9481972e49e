"""The state of Megatron's distributed optimizer as it lies in its buckets: ``dp_reshardable``.

Each bucket of each model-parallel rank is a 1-d tensor, whose chunks are parameters' pieces and the
padding between them (megatron-core 0.7 to 0.20; before 0.15 it was called
``fully_sharded_bucket_space``). Nothing in it names a parameter.

What lies in the buckets of Megatron's distributed optimizer besides parameters' state.

A bucket of ``dp_reshardable`` is a 1-d tensor ``[chained_K.]optimizer.distributed``
``.dp_group_idx_G.gbuf_idx_N.dtype_(PARAM, GRAD).bucket_idx_B.STATE``, whose chunks are parameters'
pieces and the padding between them (megatron-core 0.7 to 0.20).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.errors import Undetermined
from ckptool.formats.megatron.optimizer.buffers import ALIGNMENT, Bucket, slots_in_buckets
from ckptool.formats.megatron.optimizer.gathered import MASTER
from ckptool.formats.megatron.parameters import Fragments, LocalParameter, StorageRun, runs_between

Group = tuple[int, int]
"""Which of several chained optimizers, and which group of data-parallel ranks."""
Buffers = dict[int, dict[int, dict[str, TensorEntry]]]
"""By buffer, bucket and kind of state."""


def buckets_among(entries: Iterable[TensorEntry]) -> dict[Group, Buffers]:
    """All buckets, by the group of ranks that share them."""
    found: dict[Group, Buffers] = {}
    for entry in entries:
        match = BUCKET.fullmatch(entry.name)
        if match and len(entry.shape) == 1:
            group = int(match[1] or 0), int(match[2])
            buffers = found.setdefault(group, {})
            buffers.setdefault(int(match[3]), {}).setdefault(int(match[5]), {})[match[6]] = entry
    return found


def bucket_state(buffers: Buffers, expected: Sequence[Sequence[LocalParameter]]) -> Fragments:
    """What one group's buckets hold of each parameter, given the parameters of each buffer.

    Raises Undetermined where the parameters do not fill the buckets exactly.
    """
    if sorted(buffers) != list(range(len(expected))):
        raise Undetermined(f"{len(buffers)} buffers, where the model has {len(expected)}")
    found: Fragments = {}
    for number, held in enumerate(expected):
        _add_buffer(buffers[number], held, found)
    return found


def _add_buffer(
    by_bucket: Mapping[int, Mapping[str, TensorEntry]],
    held: Sequence[LocalParameter],
    found: Fragments,
) -> None:
    states = [by_bucket[number] for number in sorted(by_bucket)]
    slots = slots_in_buckets([one.numel for one in held], [_bucket(state) for state in states])
    if slots is None or len({frozenset(state) for state in states}) != 1:
        raise Undetermined(
            f"the model's {len(held):,} parameters of {sum(one.numel for one in held):,} elements"
            f" do not fill its {len(states):,} buckets, in the order in which Megatron fills them"
        )
    runs = [{kind: _runs(entry) for kind, entry in state.items()} for state in states]
    for one, slot in zip(held, slots, strict=True):
        for kind, run in runs[slot.bucket].items():
            name = "fp32" if kind == MASTER else kind
            cut = runs_between(run, slot.start, slot.stop)
            found.setdefault((name, one.name), []).append((one, cut))


def _bucket(state: Mapping[str, TensorEntry]) -> Bucket:
    entry = next(iter(state.values()))
    cuts = {chunk.box.lo[0] for chunk in entry.chunks} | {chunk.box.hi[0] for chunk in entry.chunks}
    return Bucket(entry.shape[0], cuts)


def _runs(entry: TensorEntry) -> list[StorageRun]:
    ordered = sorted(entry.chunks, key=lambda chunk: chunk.box.lo)
    return [
        StorageRun(chunk.box.shape, entry.source_dtype, chunk.at, chunk.box.lo[0], chunk.rank)
        for chunk in ordered
    ]


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
