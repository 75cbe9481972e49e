"""Which share of the data a verification reads."""

from __future__ import annotations

import random
from collections.abc import Container

from ckptool.core.catalog import Item
from ckptool.engine.spans import Span


class Sample:
    """A ``share`` of the items and of the spans outside them, chosen by ``seed``; or all."""

    def __init__(self, share: float, seed: int) -> None:
        self.is_all = share >= 1
        self._share = share
        self._chance = random.Random(seed)
        self._choices: dict[Item, bool] = {}

    def takes(self, item: Item) -> bool:
        """Whether an item is in the sample, however often that is asked."""
        if self.is_all:
            return True
        if item not in self._choices:
            self._choices[item] = self._chance.random() < self._share
        return self._choices[item]

    def of(self, spans: list[Span], chosen: Container[str]) -> list[Span]:
        """The spans to be read: all in files of which items were ``chosen``, some of the others."""
        if self.is_all:
            return spans
        return [s for s in spans if s.file in chosen or self._chance.random() < self._share]
