"""The state of Megatron's distributed optimizer as it lies in its buckets: ``dp_reshardable``.

Each bucket of each model-parallel rank is a 1-d tensor, whose chunks are parameters' pieces and the
padding between them (megatron-core 0.7 to 0.20; before 0.15 it was called
``fully_sharded_bucket_space``). Nothing in it names a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptool.core.catalog import TensorEntry
from ckptool.formats._megatron_buffers import Bucket, slots_in_buckets
from ckptool.formats._megatron_distrib import MASTER
from ckptool.formats._megatron_padding import BUCKET
from ckptool.formats._megatron_params import Found, Held, Stored, runs_between
from ckptool.formats._megatron_state import Unnamed

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


def bucket_state(buffers: Buffers, expected: Sequence[Sequence[Held]]) -> Found:
    """What one group's buckets hold of each parameter, given the parameters of each buffer.

    Raises Unnamed where the parameters do not fill the buckets exactly.
    """
    if sorted(buffers) != list(range(len(expected))):
        raise Unnamed(f"{len(buffers)} buffers, where the model has {len(expected)}")
    found: Found = {}
    for number, held in enumerate(expected):
        _add_buffer(buffers[number], held, found)
    return found


def _add_buffer(
    by_bucket: Mapping[int, Mapping[str, TensorEntry]], held: Sequence[Held], found: Found
) -> None:
    states = [by_bucket[number] for number in sorted(by_bucket)]
    slots = slots_in_buckets([one.numel for one in held], [_bucket(state) for state in states])
    if slots is None or len({frozenset(state) for state in states}) != 1:
        raise Unnamed(
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


def _runs(entry: TensorEntry) -> list[Stored]:
    ordered = sorted(entry.chunks, key=lambda chunk: chunk.box.lo)
    return [
        Stored(chunk.box.shape, entry.source_dtype, chunk.at, chunk.box.lo[0], chunk.rank)
        for chunk in ordered
    ]
