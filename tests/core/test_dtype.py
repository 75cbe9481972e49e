"""What is known of floats, against what torch makes of their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptool.core.dtype import BEYOND_SATURATION, BY_NAME, EXPONENTS, SATURATES, DType
from ckptool.engine.check.content import all_finite
from ckptool.engine.read.numbers import decode, is_finite

FLOATS = [dtype for dtype in BY_NAME.values() if dtype.kind == "float"]


def codes_of(dtype: DType) -> np.ndarray:
    """Every code of one or two bytes; of more those beside the first that is not finite."""
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    first, sign = dtype.first_special or 0, 1 << (8 * dtype.itemsize - 1)
    around = [0, 1, first - 1, first, first + 1, sign - 1]
    return np.array([code + s for code in around for s in (0, sign)], f"u{dtype.itemsize}")


def by_torch(codes: np.ndarray, dtype: DType) -> torch.Tensor:
    return torch.from_numpy(codes.view("u1")).view(getattr(torch, dtype.name)).double()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_and_those_that_are_none_are_torchs(dtype: DType) -> None:
    codes = codes_of(dtype)
    numbers = by_torch(codes, dtype)
    assert torch.equal(torch.from_numpy(is_finite(codes, dtype)), numbers.isfinite())
    for code, number in zip(codes, numbers, strict=True):
        assert all_finite(memoryview(code.tobytes()), dtype) == bool(number.isfinite())
    with np.errstate(invalid="ignore"):
        found = torch.from_numpy(decode(codes, dtype).astype(np.float64))
    assert torch.equal(found.nan_to_num(1.5), numbers.nan_to_num(1.5))
    assert torch.equal(found.isnan(), numbers.isnan())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_parts_and_range_of_a_float_are_torchs(dtype: DType) -> None:
    info = torch.finfo(getattr(torch, dtype.name))
    numbers = by_torch(codes_of(dtype), dtype)
    if dtype.name != EXPONENTS:
        # torch 2.13 says 0.125 of e5m2fnuz, but 1.25 follows 1
        follows = numbers[numbers > 1].min() - 1 if dtype.itemsize == 1 else info.eps
        assert follows == 0.5**dtype.mantissa
        assert info.smallest_normal == 2.0 ** (1 - dtype.bias)
    assert dtype.largest == (info.max if bool(numbers.isinf().any()) else 0)


def test_what_follows_the_largest_number_begins_half_way() -> None:
    largest = torch.finfo(getattr(torch, SATURATES)).max
    before = by_torch(np.array([0x7D], "u1"), BY_NAME[SATURATES]).item()
    assert largest + (largest - before) / 2 == BEYOND_SATURATION


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_parts_of_a_complex_number_are_of_half_its_size(name: str) -> None:
    part = BY_NAME[name].part
    assert (part.kind, 2 * part.itemsize) == ("float", BY_NAME[name].itemsize)
    assert part.part is part


def test_a_signaling_nan_in_a_complex_number_is_read_without_a_warning() -> None:
    stored = np.array([0x7FA00001, 0], np.uint32).view(np.complex64)
    with np.errstate(invalid="raise"):
        (size,) = decode(stored, BY_NAME["complex64"])
    assert np.isnan(size)
