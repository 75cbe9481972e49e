"""Weighted sums take the same memory whatever the number of tensors, and are the same bits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Computed, StridedPart, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.formulas import weighted
from ckptool.engine.formulas.weighted import WeightedSum, same_box
from ckptool.engine.read.numbers import Array

SHAPE = (512, 1024)


def values_of(number: int) -> Array:
    return np.random.default_rng(number).standard_normal(SHAPE).astype("f4")


def gather(entry: TensorEntry, box: Box, made: Callable[[int], Array] = values_of) -> Array:
    values = made(int(entry.name))
    return np.ascontiguousarray(values[tuple(map(slice, *box))]).view("u4")


def sum_of(count: int) -> tuple[WeightedSum, Computed]:
    entries = tuple(TensorEntry(f"{n}", (), BY_NAME["float32"], SHAPE, ()) for n in range(count))
    summed = WeightedSum(tuple(1.0 + n / 7 for n in range(count)), 3.0)
    part = StridedPart(SHAPE, 0, row_major_strides(SHAPE, 1))
    return summed, Computed(entries, part, summed, reads=same_box)


def peak(count: int) -> int:
    """Return the bytes of memory that a sum of so many tensors takes."""
    summed, at = sum_of(count)
    tracemalloc.start()
    try:
        summed(gather, at, Box.whole(SHAPE), BY_NAME["float32"])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_tensors() -> None:
    assert peak(16) < peak(2) + (1 << 20)


@pytest.mark.parametrize("most", [8, 24_000, 1 << 30])
def test_parts_of_any_size_have_the_same_bits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighted, "_MOST", most)
    summed, at = sum_of(3)
    box = Box((3, 5), (9, 1001))
    kept = partial(gather, made=cache(values_of))
    found = summed(kept, at, box, BY_NAME["float32"]).view("f4").reshape(box.shape)
    a, b, c = (values_of(n).astype("f8")[3:9, 5:1001] for n in range(3))
    wanted = ((a + b * (1 + 1 / 7)) + c * (1 + 2 / 7)) / 3.0
    assert found.tobytes() == wanted.astype("f4").tobytes()


def test_zeros_keep_their_sign() -> None:
    _, at = sum_of(2)
    summed = WeightedSum((1.0, 1.0))
    made = summed(
        lambda entry, box: np.full(box.shape, 0x8000_0000, "u4"),
        at,
        Box((0, 0), (1, 3)),
        BY_NAME["float32"],
    )
    assert made.tolist() == [0x8000_0000] * 3
