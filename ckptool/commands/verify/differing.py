"""A tensor that differs from its counterpart: where, how, and who holds it on either side."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.commands.verify.compare import Difference, Pair
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.plan import ChunkIndex
from ckptool.errors import Problem


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an element: the file, and the rank that wrote it if known."""

    file: str
    rank: int | None

    def __str__(self) -> str:
        return self.file if self.rank is None else f"rank {self.rank}, {self.file}"


@dataclass(frozen=True, slots=True)
class DifferingTensor:
    """A tensor whose values differ: how, and who holds the first differing element, here and there.

    ``elements`` is the number of all elements of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    difference: Difference
    holders: tuple[Holder, Holder]

    @property
    def problem(self) -> Problem:
        """The difference in one line."""
        found = self.difference
        largest = "" if found.largest is None else f", largest difference {found.largest:.6g}"
        message = (
            f"{self.name}: {found.elements:,} of {self.elements:,} elements differ, first at"
            f" {list(found.first)}: {found.values[0]} here ({self.holders[0]}),"
            f" {found.values[1]} there ({self.holders[1]}){largest}"
        )
        return Problem(message, "tensor-differs", file=self.holders[0].file, tensor=self.name)


def described(pair: Pair, difference: Difference) -> DifferingTensor:
    """The difference of a pair, with the holders of its first element."""
    one, other = (_holder(entry, difference.first) for entry in (pair.one, pair.other))
    entry = pair.one
    return DifferingTensor(entry.name, entry.shape, entry.elements, difference, (one, other))


def _holder(entry: TensorEntry, at: tuple[int, ...]) -> Holder:
    chunk, _ = next(ChunkIndex(entry).find(Box.at(at, (1,) * len(at))))
    return Holder(chunk.at.file, chunk.rank)
