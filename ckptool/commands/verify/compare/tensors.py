"""Compare pairs of tensors, whatever their storage. Without numpy, unless elements are compared."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, field

from ckptool.commands.options.verify import CompareOptions
from ckptool.commands.verify.compare.difference import Difference
from ckptool.core.dtype import short_name
from ckptool.engine.check.pairs import Failure, PairSource, PairTile, TensorPair
from ckptool.engine.check.run_pairs import run_jobs
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import read_tiles


class TensorComparison(Struct, frozen=True):
    """Differences by the first one's name; ``unreadable`` are those of which a side cannot be read.

    ``ranges`` counts numbers that casts changed to infinity, or saturated: the same on both sides.
    """

    differences: dict[str, Difference] = field(default_factory=dict)
    unreadable: dict[str, Failure] = field(default_factory=dict)
    ranges: RangeCheck = field(default_factory=RangeCheck)


def compare(
    pairs: Sequence[TensorPair],
    reads: tuple[TensorSource, TensorSource],
    options: CompareOptions,
    workers: int,
    progress: Progress = UNWATCHED,
) -> TensorComparison:
    """Compare all pairs on a few threads, with a few MiB of memory each.

    Bit by bit without a tolerance: equal NaN patterns are equal, 0.0 and -0.0 are not; after a cast
    any NaN equals any other. Numbers are equal if ``|a - b| <= atol + rtol * |b|``, and NaN equals
    NaN. The chunks of every tensor must tile it exactly. Raises Unsupported if a cast needs torch
    and torch is missing.
    """
    found = TensorComparison()
    look = note_differences(found, options)
    source = PairSource(*reads)
    read_tiles(source, run_jobs(pairs, source.sides), look, workers, progress)
    return found


def note_differences(
    found: TensorComparison, options: CompareOptions
) -> Callable[[None, Iterator[PairTile]], None]:
    """Return a function that notes the differences in a job's tiles, on any of several threads."""
    lock = threading.Lock()

    def look(subject: None, tiles: Iterator[PairTile]) -> None:
        for tile in tiles:
            if tile.pair is not None and tile.pair.one.name not in found.unreadable:
                look_at(tile.pair.one.name, tile)

    def look_at(name: str, tile: PairTile) -> None:
        from ckptool.commands.verify.compare.elements import find_difference

        if tile.failure is not None:
            with lock:
                found.unreadable.setdefault(name, tile.failure)
        elif (difference := find_difference(tile, options, found.ranges)) is not None:
            with lock:
                known = found.differences.get(name)
                found.differences[name] = known.plus(difference) if known else difference

    return look


def cast_text(pairs: Sequence[TensorPair]) -> str:
    """Return the words on how many of equal pairs were cast before they were compared."""
    both = sum(pair.is_cast for pair in pairs)
    if both:
        return f", {both:,} of them cast to the coarser type of both"
    cast = (pair.one for pair in pairs if pair.one.dtype != pair.one.source_dtype)
    counts = Counter(short_name(entry.dtype.name) for entry in cast)
    return "".join(f", {n:,} of them after a cast to {name}" for name, n in counts.items())
