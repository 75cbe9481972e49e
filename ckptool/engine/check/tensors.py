"""Compare pairs of tensors, whatever their storage. Without numpy, unless elements are compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from ckptool.engine.check.difference import Difference, Tolerance
from ckptool.engine.check.pairs import Failure, PairSource, PairTile, TensorPair
from ckptool.engine.check.run_pairs import run_jobs
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import read_tiles


class TensorComparison(Struct):
    """The results of comparing pairs of tensors, by the first one's name; several threads add them.

    Bits are compared, or numbers within a ``tolerance``. ``unreadable`` has the pairs of which a
    side cannot be read. ``ranges`` counts numbers that casts changed to infinity, or saturated: the
    same on both sides.
    """

    tolerance: Tolerance | None = None
    differences: dict[str, Difference] = field(default_factory=dict)
    unreadable: dict[str, Failure] = field(default_factory=dict)
    ranges: RangeCheck = field(default_factory=RangeCheck)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, subject: None, tiles: Iterator[PairTile]) -> None:
        """Note the differences in a job's tiles."""
        for tile in tiles:
            if tile.pair is not None and tile.pair.one.name not in self.unreadable:
                self._look_at(tile.pair.one.name, tile)

    def _look_at(self, name: str, tile: PairTile) -> None:
        from ckptool.engine.check.elements import find_difference

        if tile.failure is not None:
            with self._lock:
                self.unreadable.setdefault(name, tile.failure)
        elif (difference := find_difference(tile, self.tolerance, self.ranges)) is not None:
            with self._lock:
                total = self.differences.get(name)
                self.differences[name] = total.plus(difference) if total else difference


def compare(
    pairs: Sequence[TensorPair],
    reads: tuple[TensorSource, TensorSource],
    tolerance: Tolerance | None,
    workers: int,
    progress: Progress = UNWATCHED,
) -> TensorComparison:
    """Compare all pairs on a few threads, with a few MiB of memory each.

    Bit by bit without a tolerance: equal NaN patterns are equal, 0.0 and -0.0 are not; after a cast
    any NaN equals any other. With one, NaN equals NaN. The chunks of every tensor must tile it
    exactly. Raises Unsupported if a cast needs torch and torch is missing.
    """
    comparison = TensorComparison(tolerance)
    source = PairSource(*reads)
    read_tiles(source, run_jobs(pairs, source.sides), comparison.look, workers, progress)
    return comparison
