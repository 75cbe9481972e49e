"""The padding between the parameters in a bucket of Megatron's distributed optimizer.

Where parameters lie in the distributed optimizer's buffers, against Megatron's own layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.formats.megatron.optimizer.buckets import (
    Bucket,
    BucketSlot,
    drop_padding,
    find_gaps,
    find_slots,
    find_slots_in_run,
)

BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.exp_avg"


def bucket(name: str, *parts: tuple[int, int, int | None]) -> TensorEntry:
    chunks = tuple(Chunk(Box((a,), (b,)), Extent("f", 4 * a, (4,)), rank) for a, b, rank in parts)
    return TensorEntry(name, (name,), BY_NAME["float32"], (parts[-1][1],), chunks)


@pytest.mark.parametrize(
    ("parts", "padding"),
    [
        pytest.param([(0, 64, 0), (64, 100, 0)], [], id="nothing between parameters"),
        pytest.param([(0, 10, 0), (10, 64, 0), (64, 70, 0)], [1], id="behind a parameter"),
        pytest.param([(0, 32, 0), (32, 50, 1), (50, 64, 1)], [2], id="a parameter goes on"),
        pytest.param([(0, 10, 0), (10, 32, 0), (32, 64, 1), (64, 70, 1)], [1, 2], id="it goes on"),
        pytest.param([(0, 32, 0), (32, 64, 1)], [], id="a parameter, or padding: kept"),
    ],
)
def test_padding_is_taken_out(parts: list[tuple[int, int, int]], padding: list[int]) -> None:
    entry = bucket(BUCKET, *parts)
    left = drop_padding(entry)
    kept = [chunk for at, chunk in enumerate(entry.chunks) if at not in padding]
    assert [chunk.at for chunk in left.chunks] == [chunk.at for chunk in kept]
    assert left.shape == (sum(chunk.box.volume for chunk in kept),)
    ends = [(chunk.box.lo[0], chunk.box.hi[0]) for chunk in left.chunks]
    assert [lo for lo, _ in ends] == [0, *(hi for _, hi in ends[:-1])]


def test_other_tensors_stay_as_they_are() -> None:
    entry = bucket("model.w", (0, 10, 0), (10, 64, 0))
    assert drop_padding(entry) is entry


@dataclass
class Laid:
    """Buckets as ``_ParamAndGradBuffer`` of megatron-core 0.16.1 lays them out, with padding."""

    starts: list[int]
    places: list[tuple[int, int]]
    numels: list[int]


def padded(value: int, divisor: int) -> int:
    return math.ceil(value / divisor) * divisor


def laid(numels: list[int], limit: int | None, dp: int) -> Laid:
    """Parameters in reverse; each bucket ends at the limit and is padded for the ranks."""
    found = Laid([], [], [])
    start = bucket_start = end = 0
    for numel in reversed(numels):
        start = padded(end, 64)
        end = start + numel
        found.starts.append(start)
        found.places.append((len(found.numels), start - bucket_start))
        if limit is not None and end - bucket_start >= limit:
            found.numels.append(end - bucket_start)
            bucket_start = end = padded(end, math.lcm(dp, 128))
    if end != bucket_start:
        found.numels.append(end - bucket_start)
    return found


NUMELS = st.lists(st.integers(1, 300), min_size=1, max_size=12)
LIMITS = st.none() | st.integers(1, 900)


@given(NUMELS, LIMITS, st.integers(1, 9))
def test_buckets_whose_sizes_are_known(numels: list[int], limit: int | None, dp: int) -> None:
    truth = laid(numels, limit, dp)
    cuts: list[set[int]] = [set() for _ in truth.numels]
    for (bucket, start), numel in zip(truth.places, reversed(numels), strict=True):
        cuts[bucket] |= {start, start + numel}
    buckets = [Bucket(n, frozenset(c)) for n, c in zip(truth.numels, cuts, strict=True)]
    found = find_slots(numels, buckets)
    assert found is not None
    assert [(slot.bucket, slot.start) for slot in reversed(found)] == truth.places


@given(NUMELS, LIMITS, st.integers(1, 9), st.booleans())
def test_a_run_of_buckets_whose_sizes_are_not_known(
    numels: list[int], limit: int | None, dp: int, views: bool
) -> None:
    """The truth is among the ways that are found, with views and without."""
    truth = laid(numels, limit, dp)
    before = [sum(truth.numels[:n]) for n in range(len(truth.numels))]
    slots = [
        BucketSlot(0, before[bucket] + start, before[bucket] + start + numel)
        for (bucket, start), numel in zip(truth.places, reversed(numels), strict=True)
    ][::-1]
    seen = truth.starts[::-1] if views else [None] * len(numels)
    assert slots in find_slots_in_run(numels, sum(truth.numels), frozenset(), seen)


def test_parameters_that_do_not_fill_their_buckets() -> None:
    assert find_slots([64, 64], [Bucket(128)]) is not None
    assert find_slots([64, 64], [Bucket(192)]) is None
    assert find_slots([64, 64], [Bucket(64)]) is None
    assert find_slots([64], [Bucket(64), Bucket(64)]) is None


def test_a_parameter_that_no_stored_chunk_begins_or_ends_with() -> None:
    assert find_slots([64, 64], [Bucket(128, frozenset({0, 64, 128}))]) is not None
    assert find_slots([64, 64], [Bucket(128, frozenset({0, 32, 128}))]) is None


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    """30 elements, padding to 64 that is kept, then the embedding; nothing after it is aligned."""
    [slots] = find_slots_in_run([50, 30], 64 + 50, frozenset({0}), [None, None])
    assert slots == [BucketSlot(0, 64, 114), BucketSlot(0, 0, 30)]


def test_padding_between_parameters() -> None:
    assert find_gaps([BucketSlot(0, 64, 80), BucketSlot(0, 0, 20), BucketSlot(0, 80, 90)]) == [
        (20, 64)
    ]
