"""Boxes of arrays, and stored bits of every element type as numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ckptool.core.box import Box
from ckptool.core.dtype import DType

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
        return stored.view(numpy_dtype(dtype.name)).astype(np.float32)
    if dtype.kind == "bits":
        raise KeyError(dtype.name)
    return stored.view(np.uint8 if dtype.kind == "bool" else dtype.name)


@lru_cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy type of an element type, of ml_dtypes where numpy has none.

    Raises KeyError if neither has it.
    """
    import ml_dtypes

    kind = np.sctypeDict.get(name) or getattr(ml_dtypes, name, None)
    if kind is None:
        raise KeyError(name)
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


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
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype.name)).astype(np.float32)
