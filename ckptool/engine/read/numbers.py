"""Boxes of arrays, and stored bits of every element type as numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ckptool.core.box import Box
from ckptool.core.dtype import EXPONENTS, DType

Array = np.ndarray[Any, np.dtype[Any]]


def part_of(values: Array, box: Box) -> Array:
    """Return a view of the elements of a box of an array."""
    inside: Any = (..., *map(slice, box.lo, box.hi))
    part: Array = values[inside]
    return part


def decode(stored: Array, dtype: DType) -> Array:
    """Return flat stored bits as integers or floats; the magnitudes of complex numbers."""
    if dtype.kind == "complex":
        return _complex(stored)
    if dtype.kind == "float" and dtype.itemsize == 1:
        return _float8_table(dtype)[stored]
    if dtype.name == "bfloat16":
        wide = stored.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if dtype.kind == "bits":
        raise KeyError(dtype.name)
    return stored.view(np.uint8 if dtype.kind == "bool" else dtype.name)


def is_finite(bits: Array, dtype: DType) -> Array:
    """Return which floats, as stored, are neither infinite nor NaN."""
    if dtype.first_special is None:
        return np.asarray(bits != dtype.only_nan)
    size = bits & bits.dtype.type((1 << (8 * dtype.itemsize - 1)) - 1)
    return np.asarray(size < dtype.first_special)


def _complex(stored: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a signaling NaN
        parts = stored.view(f"f{stored.itemsize // 2}").astype(np.float64)
    return np.hypot(parts[::2], parts[1::2])


@lru_cache
def _float8_table(dtype: DType) -> Array:
    """Return the value of each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype.name == EXPONENTS:
        values = np.ldexp(1.0, codes.astype(int) - dtype.bias)
    else:
        exponent = (codes & 0x7F).astype(int) >> dtype.mantissa
        fraction = (codes & ((1 << dtype.mantissa) - 1)) / (1 << dtype.mantissa)
        scale = np.ldexp(1.0, np.maximum(exponent, 1) - dtype.bias)
        values = np.where(codes < 128, 1, -1) * scale * (fraction + (exponent > 0))
    is_infinite = dtype.largest and (codes & 0x7F) == dtype.first_special
    special = np.where(is_infinite, np.copysign(np.inf, values), np.nan)
    return np.where(is_finite(codes, dtype), values, special).astype(np.float32)
