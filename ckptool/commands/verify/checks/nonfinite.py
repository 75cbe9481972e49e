"""How many values of tensors are NaN or infinite, and where the first of them is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from msgspec import Struct

from ckptool.commands.verify.checks.measures import measure_each
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.sharding.index import ChunkIndex
from ckptool.core.state_category import state_category
from ckptool.engine.read.numbers import decode
from ckptool.engine.read.tensors import TensorTile
from ckptool.errors import Problem
from ckptool.storage.files import Files


class _Count(Struct):
    """Counts of NaN and infinite values so far, how many of these are ``below`` zero, and the first
    in row-major order: its index and its value.
    """

    nan: int = 0
    inf: int = 0
    below: int = 0
    first: tuple[int, ...] | None = None
    value: float = 0.0

    @classmethod
    def of(cls, entry: TensorEntry, tiles: Iterator[TensorTile]) -> _Count:
        count = cls()
        for tile in tiles:
            count.add(tile, entry)
        return count

    def add(self, tile: TensorTile, entry: TensorEntry) -> None:
        """Count the values of a tile, which follows those before in row-major order."""
        values = decode(tile.values.reshape(-1), entry.source_dtype)
        odd = np.flatnonzero(~np.isfinite(values))
        if not odd.size:
            return
        nan = int(np.count_nonzero(np.isnan(values[odd])))
        self.nan, self.inf = self.nan + nan, self.inf + odd.size - nan
        self.below += int(np.count_nonzero(np.real(values[odd]) < 0))
        if self.first is None:
            inside = np.unravel_index(int(odd[0]), tile.box.shape)
            self.first = tuple(int(a) + b for a, b in zip(inside, tile.box.lo, strict=True))
            self.value = float(values[odd[0]])


_PARTS = ("model", "optimizer")
"""Where such values matter, the worse first."""


def not_finite_problems(
    located: Mapping[str, TensorEntry], names: Collection[str], source: Files
) -> list[Problem]:
    """Return the problem of each tensor with such values by its name; these are read once more.

    Those of the model come first; tensors of neither model nor optimizer may have any values.
    """
    odd = [entry for name, entry in located.items() if name in names]
    entries = [entry for part in _PARTS for entry in odd if state_category(entry) == part]
    counts = measure_each(entries, source, _Count.of)
    return [_problem(entry, counts.get(entry.name)) for entry in entries]


def _problem(entry: TensorEntry, count: _Count | None) -> Problem:
    if count is None or count.first is None:
        message = f"{entry.name}: NaN or infinite values"
        return Problem(message, "not-finite", tensor=entry.name).with_counts()
    at = Box.at(count.first, (1,) * len(count.first))
    chunk = next(ChunkIndex(entry).find(at)).chunk
    place = chunk.at.file if chunk.rank is None else f"rank {chunk.rank}, {chunk.at.file}"
    message = f"{entry.name}: {count.nan:,} NaN and {count.inf:,} infinite values"
    message += f" of {entry.elements:,}, first {count.value} at {list(count.first)} ({place})"
    problem = Problem(message, "not-finite", file=chunk.at.file, tensor=entry.name)
    return problem.with_counts(nan=count.nan, infinite=count.inf, below_zero=count.below)
