"""Stored elements as floats of 64 bits, in which formulas compute, and back."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.core.dtype import BY_NAME, DType
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.rounding import cast

_PIECE = 1 << 16
"""Elements that are computed at a time, of which a few doubles fit the processor's cache."""
SINGLE, DOUBLE, _HALF = BY_NAME["float32"], BY_NAME["float64"], BY_NAME["float16"]


def pieces(count: int) -> Iterator[slice]:
    """Yield the pieces in which so many elements are computed."""
    return (slice(start, start + _PIECE) for start in range(0, count, _PIECE))


def as_floats(bits: Array, stored: DType) -> Array:
    """Return stored floats as numpy has them, exactly."""
    if stored == _HALF:  # numpy's own cast is slow
        bits, stored = cast(bits, stored, SINGLE), SINGLE
    return decode(bits, stored)


def as_doubles(bits: Array, stored: DType) -> Array:
    """Return stored floats as floats of 64 bits, exactly."""
    return as_floats(bits, stored).astype("f8", copy=False)


def from_doubles(numbers: Array, wanted: DType) -> Array:
    """Return floats of 64 bits as bits of a type, cast once, as torch casts."""
    return cast(numbers.view("u8"), DOUBLE, wanted)
