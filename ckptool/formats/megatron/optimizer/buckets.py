"""The buckets of Megatron's distributed optimizer: where each parameter lies, and padding.

``dp_reshardable`` stores each bucket of each model-parallel rank as a 1-d tensor
``[chained_K.]optimizer.distributed.dp_group_idx_G.gbuf_idx_N.dtype_(PARAM, GRAD).bucket_idx_B``
``.STATE``, whose chunks are parameters' pieces and the padding between them (megatron-core 0.7 to
0.20; before 0.15 it was called ``fully_sharded_bucket_space``). Nothing in it names a parameter.

A buffer holds the parameters of one element type (and of dense or expert layers) in reverse order
of the model, each at a multiple of 64 elements. It is cut into buckets; a bucket ends once it has
reached the bucket size, and a shared embedding has a bucket of its own. What is saved of it is
everything up to its padding, which makes it divisible among the data-parallel ranks
(``_ParamAndGradBuffer``, megatron-core 0.5 to 0.20).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, pairwise

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.core.views import narrow
from ckptool.errors import Undetermined
from ckptool.formats.megatron.model import is_expert
from ckptool.formats.megatron.tensor_parallel import (
    Fragments,
    LocalParameter,
    add_fragments,
)

ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_MOST_STEPS = 1_000_000
_MASTER = "param"
_BUCKET = re.compile(
    r"(?:chained_([0-9]{1,3})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,7})"
    r"\.gbuf_idx_([0-9]{1,4})\.dtype_(.+)\.bucket_idx_([0-9]{1,7})\.(\w+)"
)
Group = tuple[int, int]
"""One of several chained optimizers, and a group of data-parallel ranks."""
Buffers = dict[int, dict[int, dict[str, TensorEntry]]]
"""By buffer, bucket and kind of state."""


def find_bucket_group(name: str) -> Group | None:
    """Return the group of ranks whose bucket a tensor is; None if it is not a bucket."""
    match = _BUCKET.fullmatch(name)
    return (int(match[1] or 0), int(match[2])) if match else None


def group_buckets(entries: Iterable[TensorEntry]) -> dict[Group, Buffers]:
    """Return all buckets, by the group of ranks that share them."""
    groups: dict[Group, Buffers] = {}
    for entry in entries:
        match = _BUCKET.fullmatch(entry.name)
        if match and len(entry.shape) == 1:
            group = int(match[1] or 0), int(match[2])
            buckets = groups.setdefault(group, {}).setdefault(int(match[3]), {})
            buckets.setdefault(int(match[5]), {})[match[6]] = entry
    return groups


def group_parameters(
    runs: Iterable[Iterable[LocalParameter]], *, experts: bool, expert_parallel: bool
) -> list[list[LocalParameter]]:
    """Return the parameters of each buffer of one optimizer, in their order.

    ``runs`` are a rank's parameters by virtual pipeline stage. ``experts`` of several ranks
    (``expert_parallel``) have an optimizer of their own, after the one of all other parameters.
    """
    buffers: list[list[LocalParameter]] = []
    for run in runs:
        by_dtype: dict[str, list[LocalParameter]] = {}
        for parameter in run:
            if experts == (expert_parallel and is_expert(parameter.name)):
                by_dtype.setdefault(parameter.dtype.name, []).append(parameter)
        buffers += by_dtype.values()
    return buffers


def read_buckets(buffers: Buffers, expected: Sequence[Sequence[LocalParameter]]) -> Fragments:
    """Return the content of one group's buckets by parameter; Undetermined if they do not fit."""
    if sorted(buffers) != list(range(len(expected))):
        raise Undetermined(f"{len(buffers)} buffers, but the model has {len(expected)}")
    fragments: Fragments = {}
    for number, parameters in enumerate(expected):
        add_fragments(fragments, _read_buffer(buffers[number], parameters))
    return fragments


def _read_buffer(
    by_bucket: Mapping[int, Mapping[str, TensorEntry]], parameters: Sequence[LocalParameter]
) -> Fragments:
    states = [by_bucket[number] for number in sorted(by_bucket)]
    numels = [parameter.numel for parameter in parameters]
    slots = find_slots(numels, [_measure_bucket(state) for state in states])
    if slots is None or len({frozenset(state) for state in states}) != 1:
        raise Undetermined(
            f"the model's {len(parameters):,} parameters of {sum(numels):,} elements"
            f" do not fill its {len(states):,} buckets, in the order in which Megatron fills them"
        )
    return cut_buckets(parameters, slots, states)


def cut_buckets(
    parameters: Sequence[LocalParameter],
    slots: Sequence[BucketSlot],
    buckets: Sequence[Mapping[str, TensorEntry]],
) -> Fragments:
    """Return the content of buckets, by kind of state, by parameter from its slot."""
    fragments: Fragments = {}
    for parameter, slot in zip(parameters, slots, strict=True):
        for kind, vector in buckets[slot.bucket].items():
            path = ("fp32" if kind == _MASTER else kind, parameter.name)
            shard = narrow(vector, 0, slot.start, slot.stop)
            fragments.setdefault(path, []).append((parameter, shard))
    return fragments


def _measure_bucket(state: Mapping[str, TensorEntry]) -> Bucket:
    entry = next(iter(state.values()))
    cuts = {edge for chunk in entry.chunks for edge in (chunk.box.lo[0], chunk.box.hi[0])}
    return Bucket(entry.shape[0], cuts)


def drop_padding(entry: TensorEntry) -> TensorEntry:
    """Return a bucket without its padding; any other tensor unchanged.

    Megatron saves padding as uninitialized memory (``torch.empty``), which may contain NaN.
    """
    if len(entry.shape) != 1 or find_bucket_group(entry.name) is None:
        return entry
    pieces: list[Chunk] = []
    size = 0
    for chunk in _select_parameters(sorted(entry.chunks, key=lambda chunk: chunk.box.lo)):
        stop = size + chunk.box.volume
        pieces.append(replace(chunk, box=Box((size,), (stop,))))
        size = stop
    return replace(entry, shape=(size,), chunks=tuple(pieces))


def _select_parameters(chunks: list[Chunk]) -> list[Chunk]:
    """Return the chunks that are parameters' pieces, of chunks in order.

    A chunk that begins between two multiples of the alignment, after a chunk of the same rank or
    after padding, is padding: a parameter continues there only where another rank's part begins.
    """
    pieces: list[Chunk] = []
    previous: Chunk | None = None
    padding = False
    for chunk in chunks:
        follows = previous is not None and previous.box.hi == chunk.box.lo
        same_rank = previous is not None and previous.rank == chunk.rank
        padding = bool(chunk.box.lo[0] % ALIGNMENT) and follows and (same_rank or padding)
        if not padding:
            pieces.append(chunk)
        previous = chunk
    return pieces


class Bucket(Struct, frozen=True):
    """A saved bucket of ``numel`` elements, and where its stored chunks begin and end."""

    numel: int
    cuts: Set[int] | None = None


class BucketSlot(Struct, frozen=True):
    """The place of a parameter: elements ``start`` to ``stop`` of a bucket."""

    bucket: int
    start: int
    stop: int


def find_slots(numels: Sequence[int], buckets: Sequence[Bucket]) -> list[BucketSlot] | None:
    """Return the slot of each parameter, in the model's order; None if they do not fill buckets.

    Every start and end must be where a stored chunk begins or ends.
    """
    slots: list[BucketSlot] = []
    bucket = position = 0
    for numel in reversed(numels):
        start = _align(position)
        if bucket < len(buckets) and start + numel > buckets[bucket].numel:
            if not _is_filled(position, buckets[bucket].numel):
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(buckets) or start + numel > buckets[bucket].numel:
            return None
        position = start + numel
        slots.append(BucketSlot(bucket, start, position))
    if bucket != len(buckets) - 1 or not _is_filled(position, buckets[bucket].numel):
        return None
    return slots[::-1] if all(_is_at_cuts(slot, buckets) for slot in slots) else None


def _is_filled(position: int, numel: int) -> bool:
    """Return whether a bucket ends with its last parameter, or where a shared embedding begins."""
    return numel in (position, _align(position))


def _is_at_cuts(slot: BucketSlot, buckets: Sequence[Bucket]) -> bool:
    cuts = buckets[slot.bucket].cuts
    return cuts is None or {slot.start, slot.stop} <= cuts


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def find_slots_in_run(
    numels: Sequence[int], total: int, embeddings: Set[int], views: Sequence[int | None]
) -> list[list[BucketSlot]]:
    """Return the slots of all parameters if buckets were saved as one run of ``total`` elements.

    The buckets themselves are not recorded: each way in which the parameters fill the run under
    some bucket size is returned; none if there are too many to examine. ``embeddings`` are the
    positions of shared ones, ``views`` where parameters begin in the buffer, if they were saved as
    views of it.
    """
    if sum(numels) == total:
        return [_pack(numels)]
    ways: list[list[BucketSlot]] = []
    for shared in (embeddings, frozenset[int]()) if embeddings else (embeddings,):
        try:
            for slots in _find_ways(numels, total, shared, views):
                if slots not in ways:
                    ways.append(slots)
        except OverflowError:
            return []
    return ways


def find_gaps(slots: Sequence[BucketSlot]) -> list[tuple[int, int]]:
    """Return the elements of a run outside all parameters: padding, which is saved as zeros."""
    ordered = sorted(slots, key=lambda slot: slot.start)
    return [(a.stop, b.start) for a, b in pairwise(ordered) if a.stop < b.start]


def _pack(numels: Sequence[int]) -> list[BucketSlot]:
    """Return the slots of consecutive parameters, without gaps."""
    slots, position = [], 0
    for numel in reversed(numels):
        slots.append(BucketSlot(0, position, position + numel))
        position += numel
    return slots[::-1]


class _Way(Struct, frozen=True):
    """A way to fill the run, up to a parameter: valid for bucket sizes above ``least``.

    ``left`` parameters remain; the run and the buffer have reached ``run`` and ``buffer``, the
    bucket began at ``begun`` of the buffer. The bucket size is at most ``most``.
    """

    left: int
    run: int = 0
    buffer: int = 0
    begun: int = 0
    least: int = 0
    most: float = math.inf
    slots: tuple[BucketSlot, ...] = ()


def _find_ways(
    numels: Sequence[int], total: int, embeddings: Set[int], views: Sequence[int | None]
) -> Iterator[list[BucketSlot]]:
    """Yield every way that gives the total: one for each range of equivalent bucket sizes.

    Raises OverflowError if there are too many to examine.
    """
    rest = [0, *accumulate(numels)]
    open_ways = [_Way(len(numels))]
    for _ in range(_MOST_STEPS):
        if not open_ways:
            return
        way = open_ways.pop()
        if not way.left:
            if way.run == total:
                yield list(way.slots[::-1])
        elif 0 <= total - way.run - rest[way.left] < ALIGNMENT * way.left:
            open_ways += _extend(way, numels[way.left - 1], way.left - 1 in embeddings, views)
    raise OverflowError


def _extend(way: _Way, numel: int, shared: bool, views: Sequence[int | None]) -> Iterator[_Way]:
    """Yield the way with its next parameter: with the bucket ended after it, and without."""
    view = views[way.left - 1]
    start = _align(way.buffer)
    run = way.run + start - way.buffer
    begun = way.begun
    if way.buffer == begun or (shared and start > begun):
        begun = start = _align_bucket(start, view)
    if view is not None and view != start:
        return
    stop = start + numel
    slots = (*way.slots, BucketSlot(0, run, run + numel))
    added = replace(way, left=way.left - 1, run=run + numel, begun=begun, slots=slots)
    size = stop - begun
    if shared or size > way.least:
        end = _align_bucket(stop, None)
        most = way.most if shared else min(way.most, size)
        yield replace(added, buffer=end, begun=end, most=most)
    if not shared and size < way.most:
        yield replace(added, buffer=stop, least=max(way.least, size))


def _align_bucket(least: int, view: int | None) -> int:
    """Return where a bucket begins, at ``least`` or later: at its first parameter's view."""
    start = -(-least // _BUCKET_ALIGNMENT) * _BUCKET_ALIGNMENT
    return view if view is not None and view >= start and not view % _BUCKET_ALIGNMENT else start
