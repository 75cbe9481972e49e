"""Compare two tensors element by element, whatever their storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from ckptool.commands.options.verify import CompareOptions
from ckptool.commands.stats import Array, decode, is_numeric
from ckptool.core.box import Box
from ckptool.core.casts import coarser
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.sharding.index import ChunkIndex
from ckptool.engine.check.pairs import (
    PairSource,
    PairTile,
    TensorPair,
    Unreadable,
    same_bits,
)
from ckptool.engine.check.small_pairs import batched_pair_jobs
from ckptool.engine.read.gather import raw
from ckptool.engine.read.rounding import RangeCheck, cast
from ckptool.engine.read.tensors import CheckedSource, TensorSource
from ckptool.engine.read.tiles import Progress, read_tiles
from ckptool.errors import CkptoolError, Problem

_AT_ONCE = 1 << 18
"""Elements that are compared as numbers at a time; that takes several times their memory."""


class Difference(Struct, frozen=True):
    """How two tensors differ.

    ``elements`` counts differing ones; ``first`` is the index of the first in row-major order,
    ``values`` are its values on both sides. ``largest`` is the largest difference between two
    numbers, None if no number meets a number.
    """

    elements: int
    first: tuple[int, ...]
    values: tuple[str, str]
    largest: float | None


class DifferingElement(Struct, frozen=True):
    """One side at an index: the value, the file, and the rank that wrote it if known."""

    value: str
    file: str
    rank: int | None

    @property
    def place(self) -> str:
        """Return the rank and file that hold it."""
        return self.file if self.rank is None else f"rank {self.rank}, {self.file}"


class DifferingTensor(Struct, frozen=True):
    """A tensor whose values differ, with both sides of its first differing element.

    ``differing`` of its ``elements`` do; ``largest`` is that of ``Difference``.
    """

    name: str = field(name="tensor")
    shape: tuple[int, ...]
    elements: int
    differing: int
    first: tuple[int, ...]
    largest: float | None
    a: DifferingElement
    b: DifferingElement

    @property
    def problem(self) -> Problem:
        """Return the difference in one line."""
        gap = "" if self.largest is None else f", largest difference {self.largest:.6g}"
        message = (
            f"{self.name}: {self.differing:,} of {self.elements:,} elements differ, first at"
            f" {list(self.first)}: A {self.a.value} ({self.a.place}),"
            f" B {self.b.value} ({self.b.place}){gap}"
        )
        return Problem(message, "tensor-differs", file=self.a.file, tensor=self.name)


def differing_tensor(pair: TensorPair, found: Difference) -> DifferingTensor:
    """Return the difference of a pair, with the holders of its first element."""
    one, sides = pair.one, []
    for entry, value in zip((one, pair.other), found.values, strict=True):
        chunk, _ = next(ChunkIndex(entry).find(Box.at(found.first, (1,) * len(found.first))))
        sides.append(DifferingElement(value, chunk.at.file, chunk.rank))
    counts = one.elements, found.elements
    return DifferingTensor(one.name, one.shape, *counts, found.first, found.largest, *sides)


class TensorComparison(Struct, frozen=True):
    """Differences by the first one's name; ``unreadable`` has the side, 0 or 1, and its error.

    ``ranges`` counts numbers that casts changed to infinity, or saturated: the same on both sides.
    """

    differences: dict[str, Difference] = field(default_factory=dict)
    unreadable: dict[str, tuple[int, CkptoolError]] = field(default_factory=dict)
    ranges: RangeCheck = field(default_factory=RangeCheck)


def compare(
    pairs: Sequence[TensorPair],
    reads: tuple[TensorSource | CheckedSource, TensorSource | CheckedSource],
    options: CompareOptions,
    workers: int,
    progress: Progress = lambda nbytes: None,
) -> TensorComparison:
    """Compare all pairs on a few threads, with a few MiB of memory each.

    Bit by bit without a tolerance: equal NaN patterns are equal, 0.0 and -0.0 are not; after a cast
    any NaN equals any other. Numbers are equal if ``|a - b| <= atol + rtol * |b|``, and NaN equals
    NaN. The chunks of every tensor must tile it exactly. Raises Unsupported if a cast needs torch
    and torch is missing.
    """
    found = TensorComparison()
    look = note_differences(found, options)
    source = PairSource(*reads)
    read_tiles(source, batched_pair_jobs(pairs, source.sides), look, workers, progress)
    return found


def note_differences(
    found: TensorComparison, options: CompareOptions
) -> Callable[[TensorPair | None, Iterator[Any]], None]:
    """Return a function that notes the differences in a job's tiles, on any of several threads."""
    lock = threading.Lock()

    def look(pair: TensorPair | None, tiles: Iterator[Any]) -> None:
        if pair is not None:
            look_at(pair, tiles)
            return
        for batch in tiles:
            for other, its_tiles in batch.others:
                look_at(other, its_tiles)

    def look_at(pair: TensorPair, tiles: Iterator[PairTile]) -> None:
        name = pair.one.name
        if name in found.unreadable:
            return
        try:
            for tile in tiles:
                difference = _difference(pair, tile, options, found.ranges)
                if difference is not None:
                    with lock:
                        known = found.differences.get(name)
                        found.differences[name] = _sum(known, difference) if known else difference
        except Unreadable as failure:
            with lock:
                found.unreadable.setdefault(name, (failure.side, failure.error))

    return look


def _sum(one: Difference, other: Difference) -> Difference:
    first = min(one, other, key=lambda item: item.first)
    sizes = [item.largest for item in (one, other) if item.largest is not None]
    elements = one.elements + other.elements
    return Difference(elements, first.first, first.values, max(sizes, default=None))


def _difference(
    pair: TensorPair, tile: PairTile, options: CompareOptions, ranges: RangeCheck
) -> Difference | None:
    """Return how a tile of a pair differs, None if it does not."""
    one, other, types = tile.one, tile.other, (pair.one.dtype, pair.other.dtype)
    if pair.is_cast:
        wanted = coarser(*types)
        one, other = cast(one, types[0], wanted), cast(other, types[1], wanted)
        ranges.note(pair.one.name, tile.one, types[0], one, wanted)
        ranges.note(pair.one.name, tile.other, types[1], other, wanted)
        types = (wanted, wanted)
    if types[0] == types[1] and same_bits(one, other):
        return None
    found = None
    for start in range(0, one.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        flat = one.reshape(-1)[part], other.reshape(-1)[part]
        differ = _differ(flat, types, options, is_cast=pair.is_cast)
        part_found = _describe(flat, types, differ, tile.box, start)
        found = _sum(found, part_found) if found and part_found else found or part_found
    return found


def _differ(
    flat: tuple[Array, Array], types: tuple[DType, DType], options: CompareOptions, *, is_cast: bool
) -> Array:
    """Return whether each element of two flat arrays differs."""
    if options.as_numbers and all(map(is_numeric, types)):
        numbers = _numbers(flat, types)
        return are_apart(*numbers, rtol=options.rtol or 0, atol=options.atol or 0)
    differ = _bits(*flat)
    if is_cast and is_numeric(types[1]):
        differ &= ~both_nan(*_numbers(flat, types))
    return differ


def _numbers(flat: tuple[Array, Array], types: tuple[DType, DType]) -> list[Array]:
    """Return the numbers of both sides, real ones with imaginary parts if the others have them."""
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
    if all(map(is_numeric, types)):
        largest = largest_gap(*_numbers((flat[0][differ], flat[1][differ]), types))
    return Difference(count, first, (values[0], values[1]), largest)


_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def numbers_of(flat: Array, dtype: DType) -> Array:
    """Return the numbers of flat elements, one row per element: complex ones have two."""
    part = BY_NAME[_PARTS.get(dtype.name, dtype.name)]
    stored = flat.view("u1").view(f"u{part.itemsize}")
    return decode(stored, part).reshape(len(flat), -1)


def both_nan(one: Array, other: Array) -> Array:
    """Return whether elements are NaN on both sides, in the same parts of a complex one."""
    return np.asarray((_is_nan(one) == _is_nan(other)).all(axis=1) & _is_nan(one).any(axis=1))


def _is_nan(values: Array) -> Array:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)


def are_apart(one: Array, other: Array, *, rtol: float, atol: float) -> Array:
    """Return whether elements differ by more than allowed; equal infinities and NaN do not."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(other.astype(np.float64))
        near = _distance(one, other) <= atol + rtol * size
        near &= np.isfinite(size)
    near |= one == other
    near |= _is_nan(one) & _is_nan(other)
    return np.asarray(~near.all(axis=1))


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
    known = gaps[~_is_nan(gaps)]
    return known.max().item() if known.size else None


def element_text(element: Array, dtype: DType) -> str:
    """Return one element as text; its bits if it is not a number."""
    if not is_numeric(dtype):
        return f"0x{raw(element).hex()}"
    if dtype.kind == "bool":
        return {0: "False", 1: "True"}.get(int(element[0]), f"0x{raw(element).hex()}")
    parts = [f"{part:.9g}" if isinstance(part, float) else str(part)
             for part in numbers_of(element, dtype)[0].tolist()]  # fmt: skip
    return parts[0] if len(parts) == 1 else f"{parts[0]}{float(parts[1]):+.9g}j"
