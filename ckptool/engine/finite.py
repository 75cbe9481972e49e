"""Whether stored elements are all finite, by their bits, as fast as memory is read.

In every IEEE-like format the non-finite codes are the largest ones of each sign. Read as integers,
positive ones are found by the largest signed value, negative ones by the largest unsigned value.
"""

from __future__ import annotations

import numpy as np

from ckptool.core.dtype import DType

_FIRST_NOT_FINITE = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
    "complex128": 0x7FF0 << 48,
    "complex64": 0x7F80 << 16,
    "complex32": 0x7C00,
}
"""The lowest positive code that is infinite or NaN; those above it are too."""

_ONLY_NAN = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
"""Formats with a single code that is no number."""


def can_be_not_finite(dtype: DType) -> bool:
    """Whether the element type has codes for NaN or infinity."""
    return dtype.name in _FIRST_NOT_FINITE or dtype.name in _ONLY_NAN


def all_finite(data: memoryview, dtype: DType) -> bool:
    """Whether no element in ``data`` is NaN or infinite; True for types that have neither."""
    if not len(data):
        return True
    only = _ONLY_NAN.get(dtype.name)
    if only is not None:
        return not bool((np.frombuffer(data, "u1") == only).any())
    first = _FIRST_NOT_FINITE.get(dtype.name)
    if first is None:
        return True
    codes = np.frombuffer(data, f"u{dtype.swap}")
    sign = 1 << (8 * dtype.swap - 1)
    return int(codes.view(f"i{dtype.swap}").max()) < first and int(codes.max()) < first + sign
