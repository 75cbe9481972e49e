"""Count the numbers beyond the range of the type they are cast to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptool.core.casts import RangeCounts
from ckptool.core.dtype import DType

if TYPE_CHECKING:
    from ckptool.engine.read.numbers import Array


class RangeCheck:
    """Counts what casts of any thread lose, by tensor; numpy is imported with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: RangeCounts = Counter()

    def note(self, name: str, values: Array, stored: DType, result: Array, target: DType) -> None:
        """Count the numbers of a tensor that a cast lost, given values as stored and as cast."""
        from ckptool.engine.read.rounding import count_lost

        count, outcome = count_lost(values, stored, result, target)
        if count:
            self.add(name, target, [(outcome, count)])

    def add(self, name: str, target: DType, losses: Iterable[tuple[str, int]]) -> None:
        """Add numbers that were counted before: what they became, and how many."""
        with self._lock:
            for outcome, count in losses:
                self.counts[name, target.name, outcome] += count

    def take(self) -> tuple[tuple[str, int], ...]:
        """Return the losses counted since the last call, all of one tensor, and begin again."""
        # without the lock: a reader that takes them has a check of its own
        losses = tuple((outcome, count) for (_, _, outcome), count in self.counts.items())
        self.counts.clear()
        return losses
