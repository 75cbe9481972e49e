"""Products of thin matrices, exact up to a last rounding if that is asked for.

BLAS adds in an order that depends on the processor and on the shapes of the factors, and each
addition rounds. Factors that are split have parts of so few bits that no product of parts, nor any
sum of these over the rank, is rounded: whatever the order, these sums are the same. Then the four
sums are added, in one order.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from ckptool.engine.read.numbers import Array

_FRACTION = 53
"""Bits of a double."""
_FEW = 1 << 14
"""Numbers of products that are added up at a time, in the processor's cache."""
_LEAST_EXPONENT = -900
"""Parts of numbers so small are zero."""


class Factor(Struct, frozen=True):
    """A matrix as the sum of a ``high`` and a ``low`` part; without a low part, as it is."""

    high: Array
    low: Array | None = None

    @property
    def whole(self) -> Array:
        """The matrix itself."""
        return self.high if self.low is None else self.high + self.low


def split(matrix: Array, rank_dim: int) -> Factor:
    """Split a matrix of doubles, of which one dim is the rank.

    The parts have 46 bits or more together, counted from the largest number of the same row or
    column: a float of 32 bits is exact unless it is 2 ** 22 times smaller than that. What is not
    finite is left as it is.
    """
    most = np.abs(matrix).max(axis=rank_dim, keepdims=True, initial=0)
    if not np.isfinite(most).all():
        return Factor(matrix)
    bits = (_FRACTION - (matrix.shape[rank_dim] - 1).bit_length()) // 2
    exponents = np.maximum(np.frexp(most)[1], _LEAST_EXPONENT) - bits
    high = _round(matrix, exponents)
    return Factor(high, _round(matrix - high, exponents - bits))


def multiply(left: Factor, right: Factor, products: Array) -> None:
    """Fill arrays with the products of a matrix and each of several, all in the same dims."""
    if left.low is None or right.low is None:
        np.matmul(left.whole, right.whole[:, None], out=products)
        return
    step = max(1, _FEW // products[0].size)
    for first in range(0, len(products), step):
        high, low = (part[first : first + step, None] for part in (right.high, right.low))
        total = left.high @ high
        total += 0.0  # the sign of a zero would be that of some order
        middle = left.high @ low
        middle += left.low @ high  # a sum of so many bits is exact, too
        total += middle
        total += left.low @ low
        products[first : first + step] = total


def _round(numbers: Array, exponents: Array) -> Array:
    """Return numbers rounded to multiples of powers of two.

    One whose last bit is that power is added, and subtracted again.
    """
    large = np.ldexp(1.5, exponents + (_FRACTION - 1))
    rounded: Array = numbers + large
    rounded -= large
    return rounded
