"""The numbers of two sides, however they are stored: how far apart, and as people write them."""

from __future__ import annotations

import numpy as np

from ckptool.commands.numbers import Array, decoded, is_numeric
from ckptool.core.dtype import BY_NAME, DType
from ckptool.engine.gather import raw

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def numbers_of(flat: Array, dtype: DType) -> Array:
    """The numbers of flat elements, one row an element: complex ones have two."""
    part = BY_NAME[_PARTS.get(dtype.name, dtype.name)]
    stored = flat.view("u1").view(f"u{part.itemsize}")
    return decoded(stored, part).reshape(len(flat), -1)


def both_nan(one: Array, other: Array) -> Array:
    """Whether elements are NaN on both sides, in the same parts of a complex one."""
    return np.asarray((_is_nan(one) == _is_nan(other)).all(axis=1) & _is_nan(one).any(axis=1))


def _is_nan(values: Array) -> Array:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)


def are_apart(one: Array, other: Array, rtol: float, atol: float) -> Array:
    """Whether elements are further apart than allowed; equal infinities and NaN are not apart."""
    if one.shape[1] != other.shape[1]:
        one, other = _as_complex(one), _as_complex(other)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(other.astype(np.float64))
        near = _distance(one, other) <= atol + rtol * size
        near &= np.isfinite(size)
    near |= one == other
    near |= _is_nan(one) & _is_nan(other)
    return np.asarray(~near.all(axis=1))


def _as_complex(parts: Array) -> Array:
    """Real numbers with a zero imaginary part."""
    return parts if parts.shape[1] == 2 else np.hstack([parts, np.zeros_like(parts)])


def _distance(one: Array, other: Array) -> Array:
    """How far numbers are apart: exact where both are integers of one type."""
    if one.dtype == other.dtype and one.dtype.kind in "iu":
        gap = np.maximum(one, other) - np.minimum(one, other)
        return gap.view(f"u{gap.itemsize}")
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs(one.astype(np.float64) - other.astype(np.float64)))


def largest_gap(one: Array, other: Array) -> float | None:
    """The largest difference between two numbers; None where none stands against a number."""
    if one.shape[1] != other.shape[1]:
        one, other = _as_complex(one), _as_complex(other)
    gaps = _distance(one, other)
    known = gaps[~_is_nan(gaps)]
    return known.max().item() if known.size else None


def shown(element: Array, dtype: DType) -> str:
    """One element as people write it; its bits where it is no number."""
    if not is_numeric(dtype):
        return f"0x{raw(element).hex()}"
    if dtype.kind == "bool":
        return {0: "False", 1: "True"}.get(int(element[0]), f"0x{raw(element).hex()}")
    parts = [f"{part:.9g}" if isinstance(part, float) else str(part)
             for part in numbers_of(element, dtype)[0].tolist()]  # fmt: skip
    return parts[0] if len(parts) == 1 else f"{parts[0]}{float(parts[1]):+.9g}j"
