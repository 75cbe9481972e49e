"""The padding between the parameters in a bucket of Megatron's distributed optimizer."""

from __future__ import annotations

import pytest

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.formats.megatron.optimizer.buckets import without_padding

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
    left = without_padding(entry)
    kept = [chunk for at, chunk in enumerate(entry.chunks) if at not in padding]
    assert [chunk.at for chunk in left.chunks] == [chunk.at for chunk in kept]
    assert left.shape == (sum(chunk.box.volume for chunk in kept),)
    ends = [(chunk.box.lo[0], chunk.box.hi[0]) for chunk in left.chunks]
    assert [lo for lo, _ in ends] == [0, *(hi for _, hi in ends[:-1])]


def test_other_tensors_stay_as_they_are() -> None:
    entry = bucket("model.w", (0, 10, 0), (10, 64, 0))
    assert without_padding(entry) is entry
