"""How much tensors changed: the norm of the change, relative to the norm of A."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from ckptool.engine.check.difference import DifferingTensor
from ckptool.engine.check.elements import numbers_of
from ckptool.engine.check.pairs import PairSource, PairTile, TensorPair, pair_jobs
from ckptool.engine.progress import Progress
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import read_tiles
from ckptool.storage.files import Files


class Squares(Struct, frozen=True):
    """Sums of squares: of the change from A to B, and of the ``base``, which is A."""

    change: float = 0.0
    base: float = 0.0

    def plus(self, other: Squares) -> Squares:
        """Return the sums over both."""
        return Squares(self.change + other.change, self.base + other.base)

    @property
    def relative(self) -> float:
        """Return ``|B - A| / |A|``: infinite if A is zero, NaN if either has such values."""
        if self.base:
            return math.sqrt(self.change / self.base)
        return math.inf if self.change else self.change


class ChangedTensor(Struct, frozen=True):
    """A tensor whose values differ. ``relative`` is None for element types that are not numbers."""

    tensor: DifferingTensor
    relative: float | None


class ChangedModule(Struct, frozen=True):
    """The number of a module's ``tensors`` that changed, and their change together."""

    module: str
    tensors: int
    changed: int
    relative: float | None


def measure(
    pairs: Sequence[TensorPair], files: tuple[Files, Files], workers: int, progress: Progress
) -> dict[str, Squares]:
    """Return the sums of squares of each numeric pair, by the first one's name; reads both."""
    sums: dict[str, Squares] = defaultdict(Squares)
    lock = threading.Lock()

    def add(subject: None, tiles: Iterator[PairTile]) -> None:
        for tile in tiles:
            pair, *values = tile.require()
            squares = _squares(pair, values)
            with lock:
                sums[pair.one.name] = sums[pair.one.name].plus(squares)

    numeric = [p for p in pairs if p.one.dtype.is_numeric and p.other.dtype.is_numeric]
    sides = PairSource(TensorSource(files[0]), TensorSource(files[1]))
    read_tiles(sides, pair_jobs(numeric), add, workers, progress)
    return dict(sums)


def _squares(pair: TensorPair, values: Sequence[Array]) -> Squares:
    sides = zip(values, (pair.one.dtype, pair.other.dtype), strict=True)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (
            numbers_of(side.reshape(-1), kind).astype(np.float64).ravel() for side, kind in sides
        )
        change = b - a
        return Squares(float(np.dot(change, change)), float(np.dot(a, a)))


def changed_tensors(
    differing: Iterable[DifferingTensor], squares: Mapping[str, Squares]
) -> tuple[ChangedTensor, ...]:
    """Return the changed tensors, largest change first: NaN before all numbers."""
    changed = [
        ChangedTensor(tensor, squares[tensor.name].relative if tensor.name in squares else None)
        for tensor in differing
    ]
    return tuple(sorted(changed, key=lambda change: _order(change.relative)))


def changed_modules(
    names: Iterable[str], changed: Iterable[ChangedTensor], squares: Mapping[str, Squares]
) -> tuple[ChangedModule, ...]:
    """Return the modules in which any of these tensors changed, largest change first.

    Tensors of one element, such as a step counter, are measured only if no other changed: their
    large numbers would hide all else.
    """
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[module_of(name)] += 1
    parts: dict[str, list[DifferingTensor]] = defaultdict(list)
    for change in changed:
        parts[module_of(change.tensor.name)].append(change.tensor)
    modules = []
    for name, tensors in parts.items():
        measured = [tensor for tensor in tensors if tensor.elements > 1] or tensors
        sums = [squares[tensor.name] for tensor in measured if tensor.name in squares]
        total = Squares(sum(s.change for s in sums), sum(s.base for s in sums))
        relative = total.relative if sums else None
        modules.append(ChangedModule(name, counts[name], len(tensors), relative))
    return tuple(sorted(modules, key=lambda module: _order(module.relative)))


def module_of(name: str) -> str:
    """Return the layer that a tensor belongs to, or else its name without the last step.

    One in no module is listed by its name; begun_later.py has one name for all of these.
    """
    steps = name.split(".")
    numbers = [at for at, step in enumerate(steps[:-1]) if step.isdecimal()]
    return ".".join(steps[: numbers[0] + 1] if numbers else steps[:-1]) or name


def _order(relative: float | None) -> tuple[bool, bool, float]:
    if relative is None:
        return True, False, 0.0
    return False, not math.isnan(relative), 0.0 if math.isnan(relative) else -relative
