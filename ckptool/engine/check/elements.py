"""Compare elements of two tensors, as bits or as numbers."""

from __future__ import annotations

import numpy as np

from ckptool.core.box import Box
from ckptool.core.casts import coarser
from ckptool.core.dtype import DType
from ckptool.engine.check.difference import Difference, Tolerance
from ckptool.engine.check.pairs import PairTile, same_bits
from ckptool.engine.read.gather import raw
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.rounding import cast, pieces


def find_difference(
    tile: PairTile, tolerance: Tolerance | None, ranges: RangeCheck
) -> Difference | None:
    """Return how a tile of a pair differs, None if it does not."""
    pair, *stored = tile.require()
    (one, other), types = stored, (pair.one.dtype, pair.other.dtype)
    if pair.is_cast:
        target = coarser(*types)
        one, other = cast(one, types[0], target), cast(other, types[1], target)
        ranges.note(pair.one.name, stored[0], types[0], one, target)
        ranges.note(pair.one.name, stored[1], types[1], other, target)
        types = (target, target)
    if types[0] == types[1] and same_bits(one, other):
        return None
    difference: Difference | None = None
    for part in pieces(one.size):  # as numbers elements take several times their memory
        flat = one.reshape(-1)[part], other.reshape(-1)[part]
        differ = _differ(flat, types, tolerance, is_cast=pair.is_cast)
        part_difference = _describe(flat, types, differ, tile.box, part.start)
        if part_difference is not None:
            difference = difference.plus(part_difference) if difference else part_difference
    return difference


def _differ(
    flat: tuple[Array, Array],
    types: tuple[DType, DType],
    tolerance: Tolerance | None,
    *,
    is_cast: bool,
) -> Array:
    """Return whether each element of two flat arrays differs."""
    if tolerance is not None and all(dtype.is_numeric for dtype in types):
        one, other = _numbers(flat, types)
        return are_apart(one, other, tolerance)
    differ = _bits(*flat)
    if is_cast and types[1].is_numeric:
        differ &= ~both_nan(*_numbers(flat, types))
    return differ


def _numbers(flat: tuple[Array, Array], types: tuple[DType, DType]) -> list[Array]:
    """Return the numbers of both sides, both as complex ones if one side is complex."""
    sides = [numbers_of(side, dtype) for side, dtype in zip(flat, types, strict=True)]
    width = max(side.shape[1] for side in sides)
    return [s if s.shape[1] == width else np.hstack([s, np.zeros_like(s)]) for s in sides]


def _bits(one: Array, other: Array) -> Array:
    """Return whether the bits of each element of two flat arrays differ."""
    rows = [np.frombuffer(raw(side), "u1").reshape(-1, side.itemsize) for side in (one, other)]
    return np.asarray((rows[0] != rows[1]).any(axis=1))


def _describe(
    flat: tuple[Array, Array],
    types: tuple[DType, DType],
    differ: Array,
    box: Box,
    start: int,
) -> Difference | None:
    """Return how elements of a box from element ``start`` on differ, None if they do not."""
    count = int(np.count_nonzero(differ))
    if not count:
        return None
    at = int(differ.argmax())
    steps = zip(box.lo, np.unravel_index(start + at, box.shape), strict=True)
    first = tuple(low + int(step) for low, step in steps)
    values = [
        element_text(side[at : at + 1], dtype) for side, dtype in zip(flat, types, strict=True)
    ]
    largest = None
    if all(dtype.is_numeric for dtype in types):
        largest = largest_gap(*_numbers((flat[0][differ], flat[1][differ]), types))
    return Difference(count, first, (values[0], values[1]), largest)


def numbers_of(flat: Array, dtype: DType) -> Array:
    """Return the numbers of flat elements, one row per element: complex ones have two."""
    stored = flat.view("u1").view(f"u{dtype.part.itemsize}")
    return decode(stored, dtype.part).reshape(len(flat), -1)


def both_nan(one: Array, other: Array) -> Array:
    """Return whether elements are NaN on both sides, in the same parts of a complex one."""
    return np.asarray((_is_nan(one) == _is_nan(other)).all(axis=1) & _is_nan(one).any(axis=1))


def _is_nan(values: Array) -> Array:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)


def are_apart(one: Array, other: Array, tolerance: Tolerance) -> Array:
    """Return whether elements differ by more than allowed; equal infinities and NaN do not."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(other.astype(np.float64))
        is_near = _distance(one, other) <= tolerance.atol + tolerance.rtol * size
        is_near &= np.isfinite(size)
    is_near |= one == other
    is_near |= _is_nan(one) & _is_nan(other)
    return np.asarray(~is_near.all(axis=1))


def _distance(one: Array, other: Array) -> Array:
    """Return the differences of numbers: exact if both are integers of one type."""
    if one.dtype == other.dtype and one.dtype.kind in "iu":
        gap = np.maximum(one, other) - np.minimum(one, other)
        return gap.view(f"u{gap.itemsize}")
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs(one.astype(np.float64) - other.astype(np.float64)))


def largest_gap(one: Array, other: Array) -> float | None:
    """Return the largest difference of two numbers; None if no number meets a number."""
    gaps = _distance(one, other)
    numbers = gaps[~_is_nan(gaps)]
    return numbers.max().item() if numbers.size else None


def element_text(element: Array, dtype: DType) -> str:
    """Return one element as text; its bits if it is not a number."""
    if not dtype.is_numeric:
        return f"0x{raw(element).hex()}"
    if dtype.kind == "bool":
        return {0: "False", 1: "True"}.get(int(element[0]), f"0x{raw(element).hex()}")
    parts = [f"{part:.9g}" if isinstance(part, float) else str(part)
             for part in numbers_of(element, dtype)[0].tolist()]  # fmt: skip
    return parts[0] if len(parts) == 1 else f"{parts[0]}{float(parts[1]):+.9g}j"
