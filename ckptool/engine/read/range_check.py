"""Count the numbers beyond the range of the type they are cast to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptool.core.casts import RangeCounts
from ckptool.core.dtype import DType

if TYPE_CHECKING:
    from ckptool.engine.read.gather import Array


class RangeCheck:
    """Counts what casts of any thread lose, by tensor; numpy is imported with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: RangeCounts = Counter()

    def note(self, name: str, values: Array, stored: DType, made: Array, wanted: DType) -> None:
        """Count those of one tensor in some values, as stored and as cast."""
        from ckptool.engine.read.rounding import count_lost

        count, became = count_lost(values, stored, made, wanted)
        if count:
            self.add(name, wanted, [(became, count)])

    def add(self, name: str, wanted: DType, lost: Iterable[tuple[str, int]]) -> None:
        """Count what was counted before."""
        with self._lock:
            for became, count in lost:
                self.counts[name, wanted.name, became] += count

    def take(self) -> tuple[tuple[str, int], ...]:
        """Return what was counted of a tensor, and begin again."""
        lost = tuple((became, count) for (_, _, became), count in self.counts.items())
        self.counts.clear()
        return lost
