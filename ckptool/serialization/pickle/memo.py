"""The memo of the pickle machine."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import Any

from ckptool.serialization.pickle.rows import RowRun


class Memo:
    """The memo of a pickle by number: ``dense`` from 0 on, ``sparse`` after a gap.

    Memo entries of rows are made on access: ``hidden`` counts them. ``fixed`` are entries that are
    never changed, by id: those of rows that were made so far, and what equal instances share.
    ``changes`` counts how often a number was reassigned.
    """

    def __init__(self) -> None:
        self.dense: list[Any] = []
        self.sparse: dict[int, Any] = {}
        self.changes = 0
        self.hidden = 0
        self.fixed: dict[int, Any] = {}
        self._firsts: list[int] = []
        self._runs: list[tuple[int, RowRun]] = []

    def __len__(self) -> int:
        return len(self.dense) + len(self.sparse) + self.hidden

    def __getitem__(self, index: int) -> Any:
        """Return the entry of this number; LookupError if there is none."""
        if index < self.plain:
            return self.dense[index] if 0 <= index < len(self.dense) else self.sparse[index]
        at = bisect_right(self._firsts, index) - 1
        after, run = self._runs[at]
        if index < self._firsts[at] + run.noted:
            value = run[index - self._firsts[at]]
            self.fixed[id(value)] = value
            return value
        return self.dense[index - after] if index < self.next_number else self.sparse[index]

    @property
    def plain(self) -> int:
        """Numbers below it are indices in ``dense``."""
        return self._firsts[0] if self._firsts else sys.maxsize

    @property
    def next_number(self) -> int:
        """The number of the next entry."""
        return len(self.dense) + self.hidden

    def add_run(self, run: RowRun) -> None:
        """Add all entries of a run of rows."""
        first = self.next_number
        self.hidden += run.noted
        self._firsts.append(first)
        self._runs.append((self.hidden, run))

    def remove_run(self, run: RowRun) -> None:
        """Remove the last run, after which nothing was added."""
        self._firsts.pop()
        self._runs.pop()
        self.hidden -= run.noted

    def put(self, index: int, value: Any) -> None:
        """Set the entry of this number; ValueError if it is invalid, or a row's."""
        if index < 0 or self.plain <= index < self.next_number:
            raise ValueError(index)
        if index < self.next_number:
            self.dense[index] = value
            self.changes += 1
        elif index == self.next_number:
            self.sparse.pop(index, None)
            self.dense.append(value)
        else:
            self.sparse[index] = value
