"""Zeros that begin or end where a rank's part of a tensor does, as slices leave that were moved.

A part that was not written to its end leaves them, too. Zeros of training have other borders: rows
that were never seen, columns of dead units, experts that are never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from ckptool.core.box import Box, start_of_run
from ckptool.core.catalog import TensorEntry
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.tensors import TensorReader

_LEAST = 32
"""Zeros of a range that may be none of chance, as underflow leaves them."""
_PART = 8
"""Zeros of a part of a row that are none of chance, beside others that are not."""
_SEEN = 64
"""Elements beside a range that are looked at."""
_MOST = 0.9
"""The share of these that is not zero if something was moved."""

Range = tuple[int, int]
"""The first element and the one after the last, in row-major order of a tensor."""


class ZeroRange(NamedTuple):
    """Zeros of a tensor that ``start`` or end at a border of the parts that ranks hold of it.

    Unless it ``is_of_ranks``, the border is an end of the tensor, which has no others.
    """

    start: int
    stop: int
    begins_at_border: bool
    is_of_ranks: bool = True

    def describe(self, entry: TensorEntry) -> str:
        """Return what is wrong with a tensor, with the numbers and the places."""
        ends = (np.unravel_index(at, entry.shape) for at in (self.start, self.stop - 1))
        first, last = ([int(n) for n in index] for index in ends)
        edge = "begin" if self.begins_at_border else "end"
        count = f"{self.stop - self.start:,} of {entry.elements:,}"
        message = f"{entry.name}: {count} values are zero, from {first} to {last}, which"
        of = "the part of a rank" if self.is_of_ranks else "the tensor"
        return f"{message} {edge} where {of} does"

    def is_of_rows(self, shape: Sequence[int]) -> bool:
        """Return whether these are all of a row, and several elements of the next one."""
        width = _width(shape)
        part = self.stop % width if self.begins_at_border else -self.start % width
        return self.stop - self.start >= width + part and part >= _PART and width >= _LEAST


def zeros_at_ends(codes: Array) -> list[Range]:
    """Return the zeros that a run begins and ends with; one range if there is nothing else."""
    if codes[0] and codes[-1]:
        return []
    other = np.flatnonzero(codes)
    if not other.size:
        return [(0, codes.size)]
    ends = [(0, int(other[0])), (int(other[-1]) + 1, codes.size)]
    return [(start, stop) for start, stop in ends if start < stop]


def zero_ranges(entry: TensorEntry, runs: list[Range]) -> Iterator[ZeroRange]:
    """Yield the ranges of zeros at borders of ranks' parts that are not borders of rows.

    Of a vector only borders inside it count: its end may not be used. Without borders inside, the
    ends of a tensor count if its rows are not short, as those of kernels are.
    """
    borders, width, whole = _borders(entry), _width(entry.shape), entry.elements
    if borders is None or (not borders and width < _LEAST):
        return
    inside = borders if width == whole else borders | {0, whole}
    is_of_ranks = bool(borders)
    for start, stop in _joined(runs):
        if stop - start < _LEAST or (start, stop) == (0, whole):
            continue
        if stop in inside and start % width:
            yield ZeroRange(start, stop, False, is_of_ranks)
        elif start in inside and stop % width:
            yield ZeroRange(start, stop, True, is_of_ranks)


def _borders(entry: TensorEntry) -> set[int] | None:
    """Return where the part of a rank ends and another's begins; None if parts are no runs."""
    parts: list[tuple[int, int, int | None]] = []
    for chunk in entry.chunks:
        first = start_of_run(chunk.box, entry.shape)
        if first is None:
            return None
        parts.append((first, first + chunk.box.volume, chunk.rank))
    ordered = sorted(parts)
    return {one[1] for one, other in pairwise(ordered) if one[2] != other[2] or one[2] is None}


def _width(shape: Sequence[int]) -> int:
    """Return the elements of a row: of the last dim of several indexes."""
    return next((size for size in reversed(shape) if size > 1), 1)


def _joined(runs: list[Range]) -> list[Range]:
    """Return the ranges; those that touch are joined."""
    joined: list[Range] = []
    for start, stop in sorted(runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


class Window(Struct):
    """Reads elements of tensors in row-major order, few at a time."""

    reader: TensorReader

    def read(self, entry: TensorEntry, start: int, stop: int) -> Array:
        """Return elements as numbers, up to the end of the first one's row."""
        width = math.prod(entry.shape[-1:])
        row, column = divmod(start, width)
        index = tuple(int(n) for n in np.unravel_index(row, entry.shape[:-1]))
        last = min(width, column + stop - start)
        box = Box((*index, column), (*(n + 1 for n in index), last))
        return decode(self.reader.elements.gather(entry, box).reshape(-1), entry.source_dtype)

    def is_cut(self, entry: TensorEntry, zeros: ZeroRange) -> bool:
        """Return whether almost nothing else is zero around a range, in its row and the next one.

        The columns of the range are looked at in a row that it does not reach: those of a dead unit
        are zero in all.
        """
        width = _width(entry.shape)
        at = zeros.stop if zeros.begins_at_border else zeros.start
        row, column = at - at % width, at % width
        if zeros.begins_at_border:
            around = [(at, min(row + width, at + _SEEN))]
            other = row + width + max(0, column - _SEEN), row + width + column
        else:
            around = [(max(row, at - _SEEN), at)]
            other = at - width, min(row, at - width + _SEEN)
        if width < entry.elements:
            around.append(other)
        if any(start < 0 or stop > entry.elements for start, stop in around):
            return False
        values = np.concatenate([self.read(entry, *run) for run in around])
        return bool(np.count_nonzero(values) >= _MOST * values.size)
