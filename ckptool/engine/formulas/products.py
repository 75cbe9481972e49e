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

    def columns(self, some: slice) -> Factor:
        """Return some of its columns."""
        return Factor(self.high[:, some], None if self.low is None else self.low[:, some])


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
    high = _rounded(matrix, exponents)
    return Factor(high, _rounded(matrix - high, exponents - bits))


def multiply(left: Factor, right: Factor) -> Array:
    """Return the product of two matrices."""
    product: Array
    if left.low is None or right.low is None:
        product = left.whole @ right.whole
        return product
    product = left.high @ right.high
    product += 0.0  # the sign of a zero would be that of some order
    middle = left.high @ right.low
    middle += left.low @ right.high  # a sum of so many bits is exact, too
    product += middle
    product += left.low @ right.low
    return product


def _rounded(numbers: Array, exponents: Array) -> Array:
    """Return numbers rounded to multiples of powers of two.

    One whose last bit is that power is added, and subtracted again.
    """
    large = np.ldexp(1.5, exponents + (_FRACTION - 1))
    rounded: Array = numbers + large
    rounded -= large
    return rounded
