"""Stored bits of every element type as numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ckptool.core.dtype import EXPONENTS, DType

Array = np.ndarray[Any, np.dtype[Any]]

_NATIVE = frozenset(
    "float64 float32 float16 int64 int32 int16 int8 uint8 uint16 uint32 uint64".split()
)
_FLOAT8 = {
    "float8_e4m3fn": (4, 7, "last"),
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e4m3fnuz": (4, 8, "zero"),
    "float8_e5m2fnuz": (5, 16, "zero"),
}
"""Exponent bits, bias, and which codes are NaN: all ones, those of IEEE 754, or minus zero."""


def decode(stored: Array, dtype: DType) -> Array:
    """Return flat stored bits as integers or floats; the magnitudes of complex numbers."""
    if dtype.name in _NATIVE:
        return stored.view(dtype.name)
    if dtype.name.startswith("float8_"):
        return _float8_table(dtype.name)[stored]
    if dtype.name.startswith("complex"):
        return _complex(stored)
    if dtype.name == "bool":
        return stored.view(np.uint8)
    if dtype.name == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    raise KeyError(dtype.name)


def _complex(stored: Array) -> Array:
    parts = stored.view(f"f{stored.itemsize // 2}").astype(np.float64)
    return np.hypot(parts[::2], parts[1::2])


@lru_cache
def _float8_table(name: str) -> Array:
    """Return the value of each of the 256 codes."""
    codes = np.arange(256)
    if name == EXPONENTS:
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
    exponent_bits, bias, nan = _FLOAT8[name]
    mantissa_bits = 7 - exponent_bits
    exponent = (codes & 0x7F) >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    scale = np.ldexp(1.0, np.maximum(exponent, 1) - bias)
    values = np.where(codes < 128, 1, -1) * scale * (fraction + (exponent > 0))
    return _with_specials(values, codes, nan).astype(np.float32)


def _with_specials(values: Array, codes: Array, nan: str) -> Array:
    size = codes & 0x7F
    if nan == "ieee":
        infinite = np.where(size == 0x7C, np.copysign(np.inf, values), values)
        return np.where(size > 0x7C, np.nan, infinite)
    return np.where(codes == 0x80 if nan == "zero" else size == 0x7F, np.nan, values)
