"""How two tensors differ, with both sides of the first differing element."""

from __future__ import annotations

from msgspec import Struct, field

from ckptool.core.box import Box
from ckptool.core.sharding.index import ChunkIndex
from ckptool.engine.check.pairs import TensorPair
from ckptool.errors import Problem


class Tolerance(Struct, frozen=True):
    """By how much numbers may differ: ``|a - b| <= atol + rtol * |b|``."""

    rtol: float = 0.0
    atol: float = 0.0


class Difference(Struct, frozen=True):
    """How two tensors differ.

    ``elements`` is the count of differing elements; ``first`` is the index of the first one in
    row-major order, ``values`` are its values on both sides. ``largest`` is the largest difference
    between two numbers, None if no number meets a number.
    """

    elements: int
    first: tuple[int, ...]
    values: tuple[str, str]
    largest: float | None

    def plus(self, other: Difference) -> Difference:
        """Return the difference of two parts of the tensors together."""
        first = min(self, other, key=lambda item: item.first)
        sizes = [item.largest for item in (self, other) if item.largest is not None]
        elements = self.elements + other.elements
        return Difference(elements, first.first, first.values, max(sizes, default=None))


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


def differing_tensor(pair: TensorPair, difference: Difference) -> DifferingTensor:
    """Return the difference of a pair, with the holders of its first element."""
    one, first, sides = pair.one, difference.first, []
    for entry, value in zip((one, pair.other), difference.values, strict=True):
        chunk = next(ChunkIndex(entry).find(Box.at(first, (1,) * len(first)))).chunk
        sides.append(DifferingElement(value, chunk.at.file, chunk.rank))
    counts = one.elements, difference.elements
    return DifferingTensor(one.name, one.shape, *counts, first, difference.largest, *sides)
