"""What an optimizer's moments look like, noted while they are read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress

import numpy as np

from ckptool.commands.verify.checks.meaning.zero_runs import (
    Range,
    Window,
    ZeroRange,
    zero_ranges,
    zeros_at_ends,
)
from ckptool.core.box import Box, start_of_run
from ckptool.core.catalog import TensorEntry
from ckptool.engine.check.fingerprint import head_in
from ckptool.engine.check.spans import Part
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.tensors import TensorReader
from ckptool.errors import CkptoolError
from ckptool.storage.files import Files


class Moment:
    """Looks at one moment of one parameter: where are values zero, and is any negative?

    ``elements`` were seen, ``negative`` of them are below zero if it ``is_square``, the first in
    row-major order at ``first``. ``head`` is the checksum of the first elements, None if these are
    stored in pieces. ``zeros`` counts those of tiles that are all zero, by the box that they are
    of, and ``runs`` are the zeros at the ends of each tile.
    """

    def __init__(self, *, is_square: bool) -> None:
        self.elements = self.negative = 0
        self.first: tuple[int, ...] | None = None
        self.head: int | None = None
        self.is_square = is_square
        self.zeros: Counter[Box] = Counter()
        self.runs: list[Range] = []
        self._lock = threading.Lock()

    @property
    def is_zero(self) -> bool:
        """Whether all that was seen is zero."""
        return self.zeros.total() == self.elements

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Look at elements of a part, the first of which is its ``first``-th."""
        itemsize = part.dtype.itemsize
        codes = np.frombuffer(data, f"u{itemsize}")
        zeros = zeros_at_ends(codes)
        start = start_of_run(part.box, part.shape) if zeros else None
        negative = self._negative_in(codes, part) if self.is_square else None
        head = head_in(data, part, first)
        with self._lock:
            self.elements += codes.size
            if zeros == [(0, codes.size)]:
                self.zeros[part.box] += codes.size
            if start is not None:
                self.runs += [(start + first + lo, start + first + hi) for lo, hi in zeros]
            self.head = self.head if head is None else head
            if negative is not None and negative.size:
                self._note(negative, first, part.box)

    @staticmethod
    def _negative_in(codes: Array, part: Part) -> Array | None:
        """Return where numbers are below zero, which is neither minus zero nor minus infinity."""
        sign = 1 << (8 * part.dtype.itemsize - 1)
        if int(codes.max()) <= sign:
            return None
        special = sign + (part.dtype.first_special or 0)
        return np.flatnonzero((codes > sign) & (codes < special))

    def _note(self, negative: Array, first: int, box: Box) -> None:
        inside = np.unravel_index(first + int(negative[0]), box.shape)
        index = tuple(int(at) + low for at, low in zip(inside, box.lo, strict=True))
        self.negative += negative.size
        self.first = index if self.first is None else min(self.first, index)


def cut_ranges(
    entry: TensorEntry, moment: Moment, weight: TensorEntry | None, source: Files
) -> Iterator[ZeroRange]:
    """Yield the zeros of a moment that end or begin at a rank's border, and nowhere else.

    Zeros where the weight is zero, too, are padding, which has no gradient. The ends of a tensor
    are no borders of ranks: if its weight is not stored, there may be padding.
    """
    ranges = list(zero_ranges(entry, moment.runs))
    if not ranges:
        return
    if weight is not None and weight.shape != entry.shape:
        weight = None
    with closing(TensorReader(source)) as reader:
        window = Window(reader)
        with suppress(CkptoolError):  # the reader of all data reports on it
            for zeros in ranges:
                is_used = weight is not None and window.read(weight, zeros.start, zeros.stop).any()
                if not is_used and (weight is not None or not zeros.is_of_ranks):
                    continue
                if window.is_cut(entry, zeros):
                    yield zeros
