"""Weighted sums of tensors: averages, moving averages, differences."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum

import numpy as np
from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import tiles
from ckptool.engine.formulas.doubles import as_doubles, from_doubles, pieces
from ckptool.engine.read.gather import unit
from ckptool.engine.read.numbers import Array

_DOUBLE = 8
_MOST = 4 << 20
"""Bytes of the doubles that are added up at a time, whatever the number of tensors."""


class WeightedSum(Struct, frozen=True):
    """The sum of tensors of one shape, each times its weight, over a ``divisor``.

    Each number is computed in 64 bits, in the order of the tensors, and then cast once, as torch
    casts. So it is the same whichever tiles it is computed in. Complex numbers are two.
    """

    weights: tuple[float, ...]
    divisor: float = 1.0

    @property
    def exceeds(self) -> bool:
        """Whether a sum may be larger than the largest of its terms, as an average is not."""
        return fsum(map(abs, self.weights)) > abs(self.divisor)

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Compute a box of the sum, as bits of a type, a part of it at a time."""
        result: Array = np.empty(box.volume, unit(dtype.itemsize))
        done, numbers = 0, result.view(f"u{dtype.part.itemsize}")
        for part in tiles(box, _DOUBLE * dtype.itemsize // dtype.part.itemsize, _MOST):
            made = from_doubles(self._sum(gather, at, part), dtype.part)
            numbers[done : done + made.size] = made
            done += made.size
        return result

    def _sum(self, gather: Gather, at: Computed, box: Box) -> Array:
        """Return a box of the sum as doubles, to which one tensor after the other is added."""
        total: Array = np.empty(0)
        with np.errstate(all="ignore"):  # what is not finite stays so
            for number, (entry, weight) in enumerate(zip(at.stored, self.weights, strict=True)):
                stored = entry.source_dtype.part
                bits = gather(entry, box).reshape(-1).view(f"u{stored.itemsize}")
                total = total if number else np.empty(bits.size)
                for piece in pieces(total.size):
                    term = as_doubles(bits[piece], stored)
                    term = term if weight == 1 else term * weight
                    # the first is not added to zeros: its own keep their sign
                    total[piece] = total[piece] + term if number else term
            return total if self.divisor == 1 else np.divide(total, self.divisor, out=total)


def same_box(at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
    """Yield that a box is computed of the same box of each stored tensor."""
    return ((entry, box) for entry in at.stored)
