"""A fingerprint of a tensor's numbers, summed up from runs of them in any order.

However a tensor is cut, and whatever the runs are, equal numbers have equal fingerprints: each
number counts times the weight of its row, times that of its column. Both are hashes of their
indexes, so two tensors that differ by chance have the same fingerprint only by chance.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest as xxh3

from ckptool.core.box import start_of_run
from ckptool.core.dtype import DType
from ckptool.engine.check.spans import Part
from ckptool.engine.checksum import CrcPiece, crc32, join_crcs
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.rounding import cast

_KEPT = 1 << 16
"""Columns whose weights are kept, of words; there are seldom more."""
_UNIT = 2
"""Bytes of a unit, of which a number is one or two."""
_WORD = 2
"""Units that are one number of 32 bits, which counts as its units do, in half the time."""
_MASK = (1 << 64) - 1
_HEAD = 1 << 10
"""Elements of a tensor by whose checksum those that may be equal are found."""


class Fingerprint(Struct):
    """The sum of so many ``elements``, modulo 2**64."""

    total: int = 0
    elements: int = 0

    def add(self, other: Fingerprint) -> None:
        """Add the sum of further elements of the same tensor."""
        self.total = (self.total + other.total) & _MASK
        self.elements += other.elements


class Printer:
    """Takes the fingerprint of a tensor while it is read, of its numbers as type ``rounded``."""

    def __init__(self, rounded: DType) -> None:
        self.found = Fingerprint()
        self._rounded = rounded
        self._lock = threading.Lock()

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Add elements of a part, the first of which is its ``first``-th."""
        bits = np.frombuffer(data, f"u{part.dtype.itemsize}")
        units = self._rounded.itemsize // _UNIT
        rounded = cast(bits, part.dtype, self._rounded).view(np.uint16)
        fingerprint = Fingerprint(_sum(rounded, first * units, part, units) & _MASK, bits.size)
        with self._lock:
            self.found.add(fingerprint)


class RunPrinter:
    """Takes a fingerprint in a third of the time, of a tensor whose parts are runs of it.

    It is the CRC-32 of the numbers in order, joined from the checksums of the runs.
    """

    def __init__(self, rounded: DType) -> None:
        self._rounded = rounded
        self._runs: list[CrcPiece] = []

    @property
    def found(self) -> tuple[int, int]:
        """The bytes that were seen, and their checksum."""
        return sum(nbytes for _, nbytes, _ in self._runs), join_crcs(self._runs)

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Add elements of a part, the first of which is its ``first``-th."""
        bits = np.frombuffer(data, f"u{part.dtype.itemsize}")
        rounded = cast(bits, part.dtype, self._rounded)
        start = ((start_of_run(part.box, part.shape) or 0) + first) * rounded.itemsize
        # one step, which needs no lock
        self._runs.append((start, rounded.nbytes, crc32(rounded)))


def head_in(data: memoryview, part: Part, first: int) -> int | None:
    """Return the checksum of a tensor's first elements; None if a part's, from ``first``, lack one.

    Tensors whose first elements differ are not equal.
    """
    if first or any(part.box.lo):
        return None
    nbytes = min(_HEAD, math.prod(part.box.hi)) * part.dtype.itemsize
    return xxh3(data[:nbytes]) if len(data) >= nbytes else None


def _sum(numbers: Array, start: int, part: Part, units: int) -> int:
    """Return the sum of adjoining units, the first of which is the box's ``start``-th."""
    width = part.box.shape[-1] * units
    first = part.box.lo[-1] * units
    row, column = divmod(start, width)
    head = min(-start % width, numbers.size)
    rows = (numbers.size - head) // width
    body = head + rows * width
    total = 0
    if head:
        total += _sum_rows(numbers[:head], row, first + column, part)
        row += 1
    if rows:
        total += _sum_rows(numbers[head:body], row, first, part, rows)
    if body < numbers.size:
        total += _sum_rows(numbers[body:], row + rows, first, part)
    return total


def _sum_rows(units: Array, row: int, column: int, part: Part, rows: int = 1) -> int:
    """Return the sum of parts of ``rows``, the box's from ``row`` on, that begin at a column."""
    width = units.size // rows
    if column % _WORD or width % _WORD:
        table, weights = units, _weigh_units(column, width)
    else:
        table, weights = units.view(np.uint32), _weigh_words(column // _WORD, width // _WORD)
    # not a product of matrices, which is slower for whole numbers
    sums = np.einsum("ij,j->i", table.reshape(rows, -1).astype(np.uint64), weights)
    return int((sums * _hash(_rows_of(part, row, rows))).sum())


def _rows_of(part: Part, start: int, count: int) -> Array:
    """Return the row numbers in the whole tensor of rows of a box; rows are along the last dim."""
    dims, box_dims = part.shape[:-1], part.box.shape[:-1]
    rows = np.arange(start, start + count, dtype=np.int64)
    if not dims:
        return rows
    if dims[1:] == box_dims[1:]:
        return rows + part.box.lo[0] * math.prod(dims[1:])
    indexes = np.unravel_index(rows, box_dims)
    indexes_in_whole = [index + low for index, low in zip(indexes, part.box.lo[:-1], strict=True)]
    return np.ravel_multi_index(indexes_in_whole, dims)


def _weigh_units(start: int, count: int) -> Array:
    """Return the weights of adjoining columns of units: their word's, shifted to their place."""
    columns = np.arange(start, start + count, dtype=np.uint64)
    shifts = columns % np.uint64(_WORD) * np.uint64(8 * _UNIT)
    first = start // _WORD
    weights = _weigh_words(first, (start + count - 1) // _WORD - first + 1)
    result: Array = weights[columns // np.uint64(_WORD) - np.uint64(first)] << shifts
    return result


def _weigh_words(start: int, count: int) -> Array:
    """Return the weights of adjoining columns of words: odd, so that no product loses a bit."""
    if start + count <= _KEPT:
        return _first_words()[start : start + count]
    return _hash(np.arange(start, start + count)) | np.uint64(1)


@cache
def _first_words() -> Array:
    return _hash(np.arange(_KEPT)) | np.uint64(1)


def _hash(numbers: Array) -> Array:
    """Return 64 mixed bits of each number, as the generator splitmix64 does."""
    mixed: np.ndarray[Any, np.dtype[np.uint64]] = numbers.astype(np.uint64)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
