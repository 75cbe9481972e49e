"""Statistics of tensors, streamed in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptool.commands.numbers import Array, decoded, is_numeric
from ckptool.commands.open import Opened
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry, coverage_problem
from ckptool.core.layout import tiles
from ckptool.core.rewrite import matches
from ckptool.engine.gather import Gatherer
from ckptool.engine.sources import Files
from ckptool.engine.unchanged import require_unchanged
from ckptool.errors import CkptoolError, Problem, UsageError, damaged

_TILE_ELEMENTS = 1 << 20

Number = int | float


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What the values of one tensor are like.

    ``minimum``, ``maximum``, ``mean`` and ``std`` (of the population) are over the finite values,
    None where there is none; of complex values they describe the magnitudes. NaN and infinite
    values are counted. All are None for element types that are no numbers (packed bits).
    """

    entry: TensorEntry
    minimum: Number | None = None
    maximum: Number | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int | None = None
    nan: int | None = None
    inf: int | None = None


@dataclass(slots=True)
class _Moments:
    """Running count, mean and sum of squared deviations (Chan's merge), with the extremes."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    minimum: Number | None = None
    maximum: Number | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    def add(self, values: Array) -> None:
        """Take in real numbers."""
        self.zeros += int(np.count_nonzero(values == 0))
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.inf += int(np.count_nonzero(np.isinf(values)))
            values = values if finite.all() else values[finite]
        if values.size:
            self._merge(values)

    def _merge(self, values: Array) -> None:
        low, high = values.min().item(), values.max().item()
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        numbers = values.astype(np.float64)
        mean = float(numbers.mean())
        numbers -= mean
        apart = mean - self.mean
        total = self.count + values.size
        self.deviations += float(np.dot(numbers, numbers))
        self.deviations += apart * apart * self.count * values.size / total
        self.mean += apart * values.size / total
        self.count = total

    def of(self, entry: TensorEntry) -> TensorStats:
        """The statistics of all that was taken in."""
        mean, std = (
            (self.mean, math.sqrt(self.deviations / self.count)) if self.count else (None,) * 2
        )
        return TensorStats(
            entry, self.minimum, self.maximum, mean, std, self.zeros, self.nan, self.inf
        )


def stats(opened: Opened, globs: Sequence[str]) -> list[TensorStats]:
    """Statistics of every tensor that matches a glob, in the order of the catalog.

    Raises UsageError where a glob matches no tensor, Damaged where chunks are missing, Changed
    where the files were written to meanwhile.
    """
    catalog = opened.catalog
    for glob in globs:
        if not any(matches(name, [glob]) for name in catalog.tensors):
            raise UsageError(
                f"--stats {glob!r} matches none of the {len(catalog.tensors):,} tensors",
                hint="globs match whole names, as `ckptool inspect --tensors '*'` lists them",
            )
    wanted = {name: e for name, e in catalog.tensors.items() if matches(name, globs)}
    problems = [gap for gap in map(coverage_problem, wanted.values()) if gap is not None]
    if problems:
        raise damaged(problems, subject=str(opened.path))
    numeric = {name: entry for name, entry in wanted.items() if is_numeric(entry.source_dtype)}
    located = opened.located(replace(catalog, tensors=numeric, objects={})).tensors
    gatherer = Gatherer(opened.source)
    try:
        found = [
            _of(located[name], gatherer) if name in located else TensorStats(entry)
            for name, entry in wanted.items()
        ]
    finally:
        gatherer.close()
    require_unchanged(catalog, opened.source)
    return found


def not_finite_count(entry: TensorEntry, source: Files) -> Problem:
    """How many values of a tensor are NaN or infinite, in words."""
    gatherer = Gatherer(source)
    try:
        found = _of(entry, gatherer)
        message = f"{entry.name}: {found.nan:,} NaN and {found.inf:,} infinite values"
        message += f" of {entry.elements:,}"
    except CkptoolError:
        message = f"{entry.name}: NaN or infinite values"
    finally:
        gatherer.close()
    return Problem(message, "not-finite", tensor=entry.name)


def _of(entry: TensorEntry, gatherer: Gatherer) -> TensorStats:
    moments = _Moments()
    with np.errstate(over="ignore", invalid="ignore"):
        for values in _values(entry, gatherer):
            moments.add(values)
    return moments.of(entry)


def _values(entry: TensorEntry, gatherer: Gatherer) -> Iterator[Array]:
    """All values of a tensor as flat arrays of real numbers."""
    dtype = entry.source_dtype
    for tile in tiles(Box.whole(entry.shape), dtype.itemsize, _TILE_ELEMENTS * dtype.itemsize):
        stored = gatherer.gathered(entry, tile)
        yield decoded(stored.reshape(-1), dtype)
