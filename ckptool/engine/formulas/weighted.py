"""Weighted sums of tensors: averages, moving averages, differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.engine.formulas.doubles import as_doubles, from_doubles, pieces
from ckptool.engine.read.numbers import Array


class WeightedSum(Struct, frozen=True):
    """The sum of tensors of one shape, each times its weight, over a ``divisor``.

    Each number is computed in 64 bits, in the order of the tensors, and then cast once, as torch
    casts. So it is the same whichever tiles it is computed in.
    """

    weights: tuple[float, ...]
    divisor: float = 1.0

    def __call__(self, gather: Gather, at: Computed, box: Box, dtype: DType) -> Array:
        """Compute a box of the sum, as bits of a type."""
        read = [(gather(entry, box).reshape(-1), entry.source_dtype) for entry in at.stored]
        result: Array = np.empty(box.volume, f"u{dtype.itemsize}")
        with np.errstate(all="ignore"):  # what is not finite stays so
            for piece in pieces(box.volume):
                terms = [as_doubles(bits[piece], stored) for bits, stored in read]
                result[piece] = from_doubles(self._sum(terms), dtype)
        return result

    def _sum(self, terms: Sequence[Array]) -> Array:
        """Return the weighted sum of doubles."""
        weighted = [n if w == 1 else n * w for n, w in zip(terms, self.weights, strict=True)]
        total = reduce(np.add, weighted)  # from the first on: zeros keep their sign
        return total if self.divisor == 1 else total / self.divisor


def same_box(at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
    """Yield that a box is computed of the same box of each stored tensor."""
    return ((entry, box) for entry in at.stored)
