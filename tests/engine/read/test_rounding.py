"""Casts by numpy, against torch's ``.to()``."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.casts import needs_torch
from ckptool.core.dtype import BY_NAME
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.rounding import cast

TYPES = ("float64", "float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
PAIRS = [(one, other) for one in TYPES for other in TYPES if one != other]
SAMPLED = [pair for pair in PAIRS if pair[0] not in HALVES]
"""Of the others every number is rounded."""
NANS_DIFFER = {("float64", "bfloat16"), ("float16", "float32")}
"""Of these torch makes one NaN in its vector code, another at the end of a tensor."""
if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
    NANS_DIFFER |= set(PAIRS)
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def by_torch(bits: Any, stored: str, wanted: str) -> Any:
    typed = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, stored))
    made = typed.to(getattr(torch, wanted)).view(torch.uint8).numpy()
    return made.view(f"u{BY_NAME[wanted].itemsize}")


def numbers(bits: Any, name: str) -> Any:
    return torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, name))


def assert_as_torch(bits: Any, stored: str, wanted: str) -> None:
    mine = cast(bits, BY_NAME[stored], BY_NAME[wanted])
    theirs = by_torch(bits, stored, wanted)
    same = mine == theirs
    if (stored, wanted) in NANS_DIFFER:
        same |= (numbers(mine, wanted).isnan() & numbers(theirs, wanted).isnan()).numpy()
    assert same.all()


@pytest.mark.parametrize(("stored", "wanted"), SAMPLED)
@given(seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=70))
def test_any_bits_are_rounded_as_torch_rounds_them(
    stored: str, wanted: str, seeds: list[int]
) -> None:
    size = BY_NAME[stored].itemsize
    bits = np.array([seed % (1 << 8 * size) for seed in seeds], f"u{size}")
    assert_as_torch(bits, stored, wanted)


@pytest.mark.parametrize(("stored", "wanted"), SAMPLED)
@given(numbers=st.lists(st.floats(allow_nan=False), min_size=1, max_size=70))
def test_any_number_is_rounded_as_torch_rounds_it(
    stored: str, wanted: str, numbers: list[float]
) -> None:
    source = torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, stored))
    bits = source.view(torch.uint8).numpy().view(f"u{BY_NAME[stored].itemsize}")
    assert_as_torch(bits, stored, wanted)


@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("stored", HALVES)
def test_every_number_of_16_bits(stored: str, wanted: str) -> None:
    if stored != wanted:
        assert_as_torch(EVERY_HALF, stored, wanted)


@pytest.mark.parametrize("wanted", HALVES)
def test_ties_subnormals_and_the_edge_of_infinity(wanted: str) -> None:
    """Half-way between any two neighbors, and one bit beside it."""
    ends = cast(EVERY_HALF, BY_NAME[wanted], BY_NAME["float32"]).astype(np.int64)
    step = (1 << 15) if wanted == "bfloat16" else (1 << 12)
    around = (ends[:, None] + step + np.array([-1, 0, 1])).reshape(-1)
    assert_as_torch(around.astype(np.uint32), "float32", wanted)
    tiny = np.arange(0x3300_0000 - 3000, 0x3300_0000 + 3000, dtype=np.uint32)
    assert_as_torch(np.concatenate([tiny, tiny | 0x8000_0000]), "float32", wanted)


def test_nans_of_32_bits_are_as_torch_makes_them() -> None:
    bits = np.array([0x7F80_0001, 0x7FC0_0000, 0xFF81_2345, 0x7FAB_E000] * 9, np.uint32)
    for wanted in ("float16", "bfloat16", "float64"):
        assert_as_torch(bits, "float32", wanted)


def test_shapes_stay_and_nothing_is_done_to_what_is_so_already() -> None:
    bits = np.frombuffer(struct.pack("<6f", *range(6)), np.uint32).reshape(2, 3)
    assert cast(bits, BY_NAME["float32"], BY_NAME["bfloat16"]).shape == (2, 3)
    assert cast(bits[:, ::2], BY_NAME["float32"], BY_NAME["float16"]).shape == (2, 2)
    assert cast(bits, BY_NAME["float32"], BY_NAME["float32"]) is bits
    assert cast(bits[:0], BY_NAME["float32"], BY_NAME["bfloat16"]).shape == (0, 3)


def test_only_torch_casts_floats_of_8_bits() -> None:
    eight = BY_NAME["float8_e4m3fn"]
    assert needs_torch(eight, BY_NAME["bfloat16"])
    assert not needs_torch(eight, eight)
    bits = np.arange(256, dtype=np.uint8)
    assert (
        cast(bits, eight, BY_NAME["float32"]) == by_torch(bits, "float8_e4m3fn", "float32")
    ).all()


@pytest.mark.parametrize(("stored", "wanted"), [*PAIRS, ("float32", "float8_e4m3fn")])
@given(seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=70))
def test_numbers_that_a_cast_makes_infinite_are_counted(
    stored: str, wanted: str, seeds: list[int]
) -> None:
    types = BY_NAME[stored], BY_NAME[wanted]
    bits = np.array(
        [seed % (1 << 8 * types[0].itemsize) for seed in seeds], f"u{types[0].itemsize}"
    )
    check = RangeCheck()
    check.note("a", bits, types[0], cast(bits, *types), types[1])
    before = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, stored))
    after = before.to(getattr(torch, wanted)).double()
    lost = before.double().isfinite() & ~after.isfinite()
    if wanted == "float8_e4m3fn":  # beyond 464 torch makes 448 of all, or NaN before 2.13
        lost = (before.abs() > 464) & (before.isfinite() | after.isfinite())
    assert check.counts.total() == int(lost.sum())
    assert {key[:2] for key in check.counts} == ({("a", wanted)} if lost.any() else set())
