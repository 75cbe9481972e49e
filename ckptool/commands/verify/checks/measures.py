"""What tensors are like, each measured in one loop over its elements; numpy is imported late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.check.pairs import PairSource, PairTile, TensorPair, pair_jobs, same_bits
from ckptool.engine.read.tensors import TensorSource, TensorTile, tensor_job
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import CkptoolError
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.engine.read.numbers import Array

_Measure = TypeVar("_Measure")


def measure_each(
    entries: Iterable[TensorEntry],
    source: Files,
    measure: Callable[[TensorEntry, Iterator[TensorTile]], _Measure],
) -> dict[str, _Measure]:
    """Return a measure of the numbers, as stored, of each tensor that can be read, by name."""
    measures: dict[str, _Measure] = {}

    def look(entry: TensorEntry, tiles: Iterator[TensorTile]) -> None:
        with suppress(CkptoolError):  # the reader of all data reports on it
            measures[entry.name] = measure(entry, tiles)

    jobs = (tensor_job(e, stored=True) for e in entries if e.source_dtype.is_numeric)
    read_tiles(TensorSource(source), jobs, look, source.policy.workers)
    return measures


def largest_sizes(entries: Iterable[TensorEntry], source: Files) -> dict[str, float]:
    """Return the largest number without sign of each tensor that can be read."""

    def largest(entry: TensorEntry, tiles: Iterator[TensorTile]) -> float:
        maxima = (float(_sizes(tile, entry).max(initial=0)) for tile in tiles)
        return max(maxima, default=0.0)

    return measure_each(entries, source, largest)


def half_reaches(entry: TensorEntry, source: Files) -> float:
    """Return a size that at least half of a tensor's numbers have, 0 if it cannot be read."""

    def least(entry: TensorEntry, tiles: Iterator[TensorTile]) -> float:
        import numpy as np

        return min((float(np.median(_sizes(tile, entry))) for tile in tiles), default=0.0)

    return measure_each([entry], source, least).get(entry.name, 0.0)


def count_moved(entries: Iterable[TensorEntry], source: Files, step: float) -> float:
    """Return how many numbers differ after a quarter of a ``step``, as their types round them.

    Zeros do not count: a row of an embedding may never be used.
    """

    def count(entry: TensorEntry, tiles: Iterator[TensorTile]) -> int:
        reach = step * 2.0 ** (entry.source_dtype.mantissa - 1)
        sizes = (_sizes(tile, entry) for tile in tiles)
        return sum(int(((of > 0) & (of < reach)).sum()) for of in sizes)

    return sum(measure_each(entries, source, count).values())


def _sizes(tile: TensorTile, entry: TensorEntry) -> Array:
    """Return the numbers of a tile without sign."""
    from ckptool.engine.read.numbers import decode

    return abs(decode(tile.values.reshape(-1), entry.source_dtype))


def are_equal(
    one: TensorEntry,
    other: TensorEntry,
    source: Files,
    other_source: Files | None = None,
    boxes: tuple[Box, ...] = (),
) -> bool:
    """Return whether two tensors of one type and shape can be read and have the same bits.

    The other may be in ``other_source``; only ``boxes`` are compared, if any. Reading ends at the
    first difference: most weights differ in their first bytes.
    """
    equal: list[bool] = []

    def compare(subject: None, tiles: Iterator[PairTile]) -> None:
        try:
            equal.append(all(same_bits(*tile.require()[1:]) for tile in tiles))
        except CkptoolError:
            equal.append(False)

    elements, jobs = TensorSource(source), pair_jobs([TensorPair(one, other, boxes=boxes)])
    sides = PairSource(elements, elements if other_source is None else TensorSource(other_source))
    read_tiles(sides, jobs, compare, source.policy.workers)
    return all(equal)
