"""Stored elements as floats of 64 bits, in which formulas compute, and back."""

from __future__ import annotations

import numpy as np

from ckptool.core.dtype import BY_NAME, DType
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.rounding import cast, cast_few

SINGLE, DOUBLE, _HALF = BY_NAME["float32"], BY_NAME["float64"], BY_NAME["float16"]


def as_floats(bits: Array, stored: DType) -> Array:
    """Return stored floats as numpy has them, exactly."""
    if stored == _HALF:  # numpy's own cast is slow
        bits, stored = cast(bits, stored, SINGLE), SINGLE
    return decode(bits, stored)


def as_doubles(bits: Array, stored: DType) -> Array:
    """Return stored floats as floats of 64 bits, exactly."""
    return as_floats(bits, stored).astype("f8", copy=False)


def from_doubles(numbers: Array, dtype: DType) -> Array:
    """Return a few floats of 64 bits as bits of a type, cast once, as torch casts.

    The bits may be the lower ones of larger words.
    """
    flat = np.ascontiguousarray(numbers).reshape(-1)
    return cast_few(flat.view("u8"), DOUBLE, dtype).reshape(numbers.shape)
