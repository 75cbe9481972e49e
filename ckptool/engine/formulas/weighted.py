"""Weighted sums of tensors: averages, moving averages, differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import frexp, fsum

import numpy as np
from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Computed, Gather, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import tiles
from ckptool.engine.formulas.doubles import SINGLE, as_doubles, as_floats, from_doubles
from ckptool.engine.read.gather import unit
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.rounding import cast_few, may_have_lost, pieces

_MOST = 4 << 20
"""Bytes that are read at a time of all tensors together."""

Terms = Sequence[tuple[Array, DType]]
"""What is added up, as stored bits and their type."""


class WeightedSum(Struct, frozen=True):
    """The sum of tensors of one shape, each times its weight, over a ``divisor``.

    Each number is as if computed in 64 bits, in the order of the tensors, and then cast once, as
    torch casts. So it is the same whichever tiles it is computed in. Complex numbers are two.
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
        rest = result.view(f"u{dtype.part.itemsize}")
        for part in tiles(box, sum(entry.source_dtype.itemsize for entry in at.stored), _MOST):
            terms = [_numbers_of(entry, gather(entry, part)) for entry in at.stored]
            count = terms[0][0].size
            out, rest = rest[:count], rest[count:]
            for piece in pieces(count):
                piece_terms = [(bits[piece], stored) for bits, stored in terms]
                self._sum(piece_terms, out[piece], dtype.part)
        return result

    def _sum(self, terms: Terms, out: Array, dtype: DType) -> None:
        """Fill an array with the sum of some numbers, cast once."""
        with np.errstate(all="ignore"):  # what is not finite stays so
            if self._is_rounded_once and all(t.itemsize <= 4 for t in (dtype, *_types(terms))):
                out[...] = cast_few(self._total(terms, "f4").view("u4"), SINGLE, dtype)
                if not may_have_lost(out, dtype):
                    return
            out[...] = from_doubles(self._total_of_doubles(terms), dtype)

    @property
    def _is_rounded_once(self) -> bool:
        """Whether a finite sum of floats of 32 bits is the same float computed in 32 or 64 bits.

        A cast of doubles to 16 bits goes through 32, too. A sum of two that was rounded to 53 bits
        is rounded to 24 as the exact one is, as 53 > 2 * 24 + 1. Halves are exact, but for those so
        small that the sum was.
        """
        are_ones = all(abs(weight) == 1 for weight in self.weights)
        return are_ones and len(self.weights) == 2 and self.divisor in (1, 2)

    def _total_of_doubles(self, terms: Terms) -> Array:
        """Return the sum in 64 bits, in which the first NaN of several stays.

        Of two that are added, numpy keeps the one or the other, depending on their place.
        """
        total = self._total(terms, "f8")
        if len(terms) > 1 and np.isnan(total.max()):  # the largest is one if any is
            odd = np.flatnonzero(np.isnan(total))
            few = [(bits[odd], stored) for bits, stored in terms]
            first, *rest = (
                as_doubles(bits, stored) * weight
                for (bits, stored), weight in zip(few, self.weights, strict=True)
            )
            for term in rest:
                first = np.where(np.isnan(first), first, first + term)
            total[odd] = first / self.divisor
        return total

    def _total(self, terms: Terms, kind: str) -> Array:
        """Return the sum as floats of a kind, to which one tensor after the other is added.

        What was computed is computed with in place: memory is what this waits for.
        """
        total: Array = np.empty(0)
        own: Array | None = None
        for number, ((bits, stored), weight) in enumerate(zip(terms, self.weights, strict=True)):
            term = as_floats(bits, stored).astype(kind, copy=False)
            term = term if weight == 1 else term * weight
            # the first is not added to zeros: its own keep their sign
            total = np.add(total, term, out=own) if number else term
            own = None if np.may_share_memory(total, bits) else total
        if frexp(self.divisor)[0] != 0.5:
            return np.divide(total, self.divisor, out=own)
        # exact, and faster
        return total if self.divisor == 1 else np.multiply(total, 1 / self.divisor, out=own)


def same_box(at: Computed, box: Box) -> Iterator[tuple[TensorEntry, Box]]:
    """Yield that a box is computed of the same box of each stored tensor."""
    return ((entry, box) for entry in at.stored)


def _numbers_of(entry: TensorEntry, values: Array) -> tuple[Array, DType]:
    """Return numbers, or the parts of complex ones, as flat bits with their type."""
    stored = entry.source_dtype.part
    return values.reshape(-1).view(f"u{stored.itemsize}"), stored


def _types(terms: Terms) -> Iterator[DType]:
    return (stored for _, stored in terms)
