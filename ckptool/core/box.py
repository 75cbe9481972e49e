"""Half-open n-dimensional boxes of integers: the only geometry a checkpoint needs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from operator import ge, le, lt, sub
from typing import Any, NamedTuple, TypeVar, overload

_T = TypeVar("_T")


class Box(NamedTuple):
    """The elements ``lo[d] <= index[d] < hi[d]`` of a tensor. A 0-d box holds one element."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the box of ``shape`` that begins at ``offset``."""
        return cls(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))

    @classmethod
    def along(cls, dim: int, start: int, shape: Sequence[int]) -> Box:
        """Return the box of ``shape`` that begins at ``start`` along ``dim``, at 0 along others."""
        return cls.at(along_dim(dim, start, len(shape)), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.hi, self.lo))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(map(sub, self.hi, self.lo))

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None if the two share no element."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(map(lt, lo, hi)) else None

    def contains(self, other: Box) -> bool:
        """Return whether every corner of ``other`` lies in this box, or on its edge if empty.

        Not if it has another number of dims.
        """
        is_inside = all(map(le, self.lo, other.lo)) and all(map(ge, self.hi, other.hi))
        return is_inside and len(self.lo) == len(other.lo)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same box in coordinates whose zero is ``origin``."""
        return Box(tuple(map(sub, self.lo, origin)), tuple(map(sub, self.hi, origin)))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{l}:{h}" for l, h in zip(self.lo, self.hi, strict=True)) + "]"


class LazySequence(Sequence[_T]):
    """Elements that are made on access, each by its number; a slice has several."""

    __slots__ = ()

    @abstractmethod
    def make(self, at: int) -> _T:
        """Return the element of this number; IndexError if there is none."""

    def make_slice(self, at: slice) -> Sequence[_T]:
        """Return the elements of a slice."""
        return tuple(self)[at]

    @overload
    def __getitem__(self, at: int) -> _T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[_T]: ...

    def __getitem__(self, at: int | slice) -> _T | Sequence[_T]:
        return self.make_slice(at) if isinstance(at, slice) else self.make(at)


class BoxTable(LazySequence[Box]):
    """Many boxes as two columns: numpy arrays ``[n, dims]`` of their lows and their highs.

    Tensors that are cut alike share a table, which remembers whether it is a grid over their shape.
    """

    __slots__ = ("_grid", "_hash", "_volumes", "highs", "lows")

    def __init__(self, lows: Any, highs: Any) -> None:
        self.lows = lows
        self.highs = highs
        self._hash: int | None = None
        self._grid: tuple[Sequence[int], bool] | None = None
        self._volumes: Any = None

    @property
    def volumes(self) -> Any:
        """The number of elements of each box, as a numpy array."""
        if self._volumes is None:
            self._volumes = (self.highs - self.lows).prod(axis=1)
        return self._volumes

    def __len__(self) -> int:
        return len(self.lows)

    def make(self, at: int) -> Box:
        """Return the box of this number; IndexError if there is none."""
        return Box(tuple(self.lows[at].tolist()), tuple(self.highs[at].tolist()))

    def make_slice(self, at: slice) -> BoxTable:
        """Return the boxes of a slice, as views of the columns."""
        return BoxTable(self.lows[at], self.highs[at])

    def __iter__(self) -> Iterator[Box]:
        lows, highs = self.lows.tolist(), self.highs.tolist()
        return map(Box, map(tuple, lows), map(tuple, highs))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BoxTable):
            pairs = ((self.lows, other.lows), (self.highs, other.highs))
            return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
        return NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.lows.tobytes(), self.highs.tobytes()))
        return self._hash

    def is_grid(self, shape: Sequence[int]) -> bool:
        """Return whether the boxes are those of a grid over the whole shape, as ``is_grid``."""
        if self._grid is None or self._grid[0] != shape:
            self._grid = (shape, self._find_grid(shape))
        return self._grid[1]

    def _find_grid(self, shape: Sequence[int]) -> bool:
        import numpy as np

        if not len(self) or self.lows.shape[1] != len(shape) or max(shape, default=0) >= 1 << 31:
            return False
        cells, count = np.zeros(len(self), np.int64), 1
        for size, low, high in zip(shape, self.lows.T, self.highs.T, strict=True):
            if low.min() < 0 or high.max() > size or (low > high).any():
                return False
            spans, cell = np.unique(low * (size + 1) + high, return_inverse=True)
            lows, highs = np.divmod(spans, size + 1)
            if lows[0] or (lows[1:] != highs[:-1]).any() or highs[-1] != size:
                return False
            cells, count = cells * len(spans) + cell, count * len(spans)
            if count > len(self):
                return False
        return count == len(self) == len(distinct(cells))


def distinct(values: Any) -> Any:
    """Return the distinct integers of a numpy array, sorted.

    Without counts ``np.unique`` (numpy 2.4) imports ``numpy.ma``, which takes 10 ms.
    """
    import numpy as np

    return np.unique(values, return_counts=True)[0]


def hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around some boxes, one at least."""
    lows, highs = zip(*boxes, strict=True)
    return Box(tuple(map(min, *lows, lows[0])), tuple(map(max, *highs, highs[0])))


def spans_of(boxes: Sequence[Box]) -> list[list[tuple[int, int]]]:
    """Return the starts and ends of some boxes in each dim; all have the same number of dims."""
    if isinstance(boxes, BoxTable):
        sides = zip(boxes.lows.T.tolist(), boxes.highs.T.tolist(), strict=True)
    else:
        lows, highs = (zip(*side, strict=True) for side in zip(*boxes, strict=True))
        sides = zip(lows, highs, strict=True)
    return [list(zip(low, high, strict=True)) for low, high in sides]


def solid_places(boxes: Sequence[Box]) -> list[int]:
    """Return the indices of the boxes that contain an element."""
    if isinstance(boxes, BoxTable):
        places: list[int] = (boxes.highs > boxes.lows).all(axis=1).nonzero()[0].tolist()
        return places
    return [place for place, box in enumerate(boxes) if box.volume]


class Piece(NamedTuple):
    """``box`` of the global tensor lies at ``local`` of a rank's local tensor (same shapes)."""

    box: Box
    local: Box


PlacedRun = tuple[int, int, int]
"""Consecutive indices of a dim: start in the global tensor, start in the local one, count."""


def pieces_of_runs(runs: Sequence[Sequence[PlacedRun]]) -> tuple[Piece, ...]:
    """Return the pieces of a local tensor that consists of these runs of each dim."""
    pieces = []
    for choice in product(*runs):
        shape = [count for _, _, count in choice]
        box = Box.at([start for start, _, _ in choice], shape)
        pieces.append(Piece(box, Box.at([local for _, local, _ in choice], shape)))
    return tuple(pieces)


def along_dim(dim: int, at: int, dims: int) -> tuple[int, ...]:
    """Return an index, or a step, that is ``at`` in one dim and 0 in all others."""
    return tuple(at if d == dim else 0 for d in range(dims))


def without_dim(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return a shape, an index or strides without one dim's."""
    return (*values[:dim], *values[dim + 1 :])


def row_major_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a C-ordered array of ``shape``."""
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def is_countable(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether torch and numpy can count the bytes of a shape, with 63 bits.

    Even if it has none, they multiply the sizes of its other dims.
    """
    return math.prod([max(size, 1) for size in shape]) * itemsize < 1 << 63


@lru_cache(maxsize=1024)
def contiguous(strides: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether a box of ``shape`` with these byte strides is one C-ordered run of bytes.

    Cached, as thousands of chunks are alike.
    """
    row = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != row:
            return False
        row *= size
    return True


def start_of_run(box: Box, shape: Sequence[int]) -> int | None:
    """Return the first element of a box of a tensor in row-major order; None if it is no run."""
    if not is_run(box, Box.whole(shape)):
        return None
    start = 0
    for low, size in zip(box.lo, shape, strict=True):
        start = start * size + low
    return start


def is_run(part: Box, box: Box) -> bool:
    """Return whether a part of a box is one run of its elements in row-major order."""
    cut = [at for at, n in enumerate(part.shape) if n < box.hi[at] - box.lo[at]]
    return not cut or all(n == 1 for n in part.shape[: cut[-1]])


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes of elements ``start`` to ``stop`` of a row-major tensor, in order.

    At most ``2 n - 1`` boxes for ``n`` dimensions: ragged ends around whole rows. Raises ValueError
    if the range is outside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} of shape {list(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        return _within_row(shape, start // row, start % row, stop % row)
    boxes = []
    if start % row:
        boxes += _within_row(shape, first - 1, start % row, row)
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:])))
    if stop % row:
        boxes += _within_row(shape, last, 0, stop % row)
    return boxes


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    inner = flat_range(shape[1:], start, stop)
    return [Box((row, *box.lo), (row + 1, *box.hi)) for box in inner]


def is_grid(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return whether the boxes form a grid over the whole shape: a cheap proof of tiling.

    Other boxes may tile it too.
    """
    if type(boxes) is BoxTable:
        return boxes.is_grid(shape)
    if len(boxes) == 1:
        lo, hi = boxes[0]
        is_whole = hi == tuple(shape) and len(lo) == len(hi) and not any(lo)
        return is_whole and min(shape, default=0) >= 0
    if not boxes or len(set(boxes)) != len(boxes):
        return False
    if any(len(box.lo) != len(shape) for box in boxes):
        return False
    count = 1
    for size, column in zip(shape, spans_of(boxes), strict=True):
        spans = sorted(set(column))
        edges = [0, *(high for _, high in spans)]
        if [low for low, _ in spans] != edges[:-1] or edges != sorted(edges) or edges[-1] != size:
            return False
        count *= len(spans)
    return count == len(boxes)
