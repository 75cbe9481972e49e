"""Weighted sums take the same memory whatever the number of tensors, and are the same bits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Computed, StridedPart, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.formulas import weighted
from ckptool.engine.formulas.weighted import WeightedSum, same_box
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.rounding import cast

SHAPE = (512, 1024)


def values_of(number: int) -> Array:
    return np.random.default_rng(number).standard_normal(SHAPE, "f4")


def gather(entry: TensorEntry, box: Box, made: Callable[[int], Array] = values_of) -> Array:
    return made(int(entry.name))[tuple(map(slice, *box))].copy().view("u4")


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
        zeros = partial(gather, made=lambda number: np.zeros(SHAPE, "f4"))
        summed(zeros, at, Box.whole(SHAPE), BY_NAME["float32"])
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


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_first_of_two_nans_stays_wherever_they_are(name: str) -> None:
    size = BY_NAME[name].itemsize
    first, other = (
        np.full(1000, value, f"f{size}").view(f"u{size}") | nan
        for value, nan in ((-np.inf, 5), (np.inf, 7))
    )
    summed = WeightedSum((1.0, 1.0), 2.0)
    made = np.empty_like(first)
    for count in range(1, 40):
        terms = [(bits[:count], BY_NAME[name]) for bits in (first, other)]
        summed._sum(terms, made[:count], BY_NAME[name])
        quiet = first[:count] | 1 << (22 if size == 4 else 51)
        assert made[:count].tolist() == quiet.tolist(), count


PAIRS = [((1.0, 1.0), 2.0), ((1.0, 1.0), 1.0), ((1.0, -1.0), 1.0), ((0.9, 0.1), 1.0)]
EVERY_HALF = np.arange(1 << 16, dtype="u2")


def assert_as_in_64_bits(
    bits: tuple[Array, Array],
    types: tuple[str, str, str],
    weights: tuple[float, float],
    over: float,
) -> None:
    """Compare sums of stored bits with those of doubles that are cast once, NaNs included."""
    entries = tuple(
        TensorEntry(f"{n}", (), BY_NAME[name], (bits[n].size,), ())
        for n, name in enumerate(types[:2])
    )
    part = StridedPart((bits[0].size,), 0, (1,))
    summed = WeightedSum(weights, over)
    at = Computed(entries, part, summed, reads=same_box)
    wanted = BY_NAME[types[2]]
    whole = Box.whole((bits[0].size,))
    made = summed(
        lambda entry, box: bits[int(entry.name)][slice(*box.lo, *box.hi)], at, whole, wanted
    )
    with np.errstate(all="ignore"):
        one, other = (
            decode(each, entry.dtype).astype("f8") * weight
            for each, entry, weight in zip(bits, entries, weights, strict=True)
        )
        total = np.where(np.isnan(one), one, one + other) / over
    assert made.tobytes() == cast(total.view("u8"), BY_NAME["float64"], wanted).tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize(("weights", "over"), PAIRS)
def test_every_number_of_16_bits_has_the_sum_that_doubles_have(
    weights: tuple[float, float], over: float, name: str
) -> None:
    random = np.random.default_rng(0)
    near = EVERY_HALF ^ random.integers(0, 1 << 9, 1 << 16).astype("u2")  # of like exponents: ties
    for other in (random.permutation(EVERY_HALF), near, EVERY_HALF, EVERY_HALF ^ 0x8000):
        assert_as_in_64_bits((EVERY_HALF, other), (name, name, name), weights, over)
    finite = EVERY_HALF[np.isfinite(decode(EVERY_HALF, BY_NAME[name]))]
    assert_as_in_64_bits((finite, random.permutation(finite)), (name,) * 3, weights, over)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=70), st.data())
def test_any_numbers_have_the_sum_that_doubles_have(seeds: list[int], data: st.DataObject) -> None:
    types = data.draw(st.tuples(*[st.sampled_from(["float32", "bfloat16", "float16"])] * 3))
    sizes = [BY_NAME[name].itemsize for name in types[:2]]
    one = np.array([seed % (1 << 8 * sizes[0]) for seed in seeds], f"u{sizes[0]}")
    other = np.array([seed >> 32 for seed in seeds]).astype(f"u{sizes[1]}")
    assert_as_in_64_bits((one, other), types, *data.draw(st.sampled_from(PAIRS)))


@given(
    st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1, max_size=70),
    st.sampled_from(PAIRS),
)
def test_any_pairs_of_32_bits_have_the_average_that_doubles_have(
    pairs: list[tuple[float, float]], sums: tuple[tuple[float, float], float]
) -> None:
    one, other = np.array(pairs, "f4").T.copy().view("u4")
    for name in ("float32", "bfloat16", "float16"):
        assert_as_in_64_bits((one, other), ("float32", "float32", name), *sums)
