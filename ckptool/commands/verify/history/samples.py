"""Samples of the matrices of a model, each from the same place in every save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np

from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.checks.meaning.stacks import Entries, Slices, is_matrix
from ckptool.commands.verify.checks.measures import are_equal
from ckptool.commands.verify.history.matrices import Matrices
from ckptool.commands.verify.history.saves import Save
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.segments import entry_needs
from ckptool.engine.read.tensors import TensorReader, TensorSource, TensorTile
from ckptool.engine.read.tiles import Job, read_tiles
from ckptool.errors import CkptoolError
from ckptool.storage.files import Files

_Key = TypeVar("_Key")
_LONGEST = 1 << 12
"""Elements of one sample: fewer if there are many."""
_TOGETHER = 1 << 20
"""Elements of all samples."""
_MOST, _MOST_ASKED = 1 << 11, 1 << 6
"""Matrices of which there are samples, of all that there are: on a disk, and in a store."""
_PLACES, _MIDDLE = 8, 4
"""Eighths of a matrix, at one of which a sample begins."""
OTHER_PLACES = 0, 2, 6
"""Eighths at which other samples begin, of a matrix whose first is like nothing."""


class Samples:
    """Samples of the matrices of a save, by the names that these have if none are stacked.

    They are of ``chosen`` matrices, from the same eighth of each. Unreadable ones have none.
    Without other ``matrices`` they are of the weights.
    """

    def __init__(
        self,
        save: Save,
        chosen: Sequence[str] = (),
        at: int = _MIDDLE,
        matrices: Matrices | None = None,
    ) -> None:
        self.save = save
        self._units: dict[str, Array] = {}
        matrices = save.weights if matrices is None else matrices
        survey = matrices.survey
        tensors = {n: e for n, e in matrices.entries.items() if e.source_dtype.kind == "float"}
        slices = Slices(tensors)
        self.all_names = frozenset(slices.names)
        self.chosen = chosen or _choose(slices, tensors, survey.source)
        stacks = {slices.tensor(name) for name in self.chosen if name in self.all_names}
        opened = locate_whole(survey, stacks)
        names = [n for n in self.chosen if n in self.all_names and slices.tensor(n) in opened]
        self.entries = Entries(slices, opened)
        longest = min(_LONGEST, _TOGETHER // max(1, len(self.chosen)))
        entries = {name: self.entries[name] for name in names}
        boxes = {n: (entry, _box_in(entry.shape, at, longest)) for n, entry in entries.items()}
        self._bits = read_boxes(boxes, survey.source)

    @property
    def names(self) -> Set[str]:
        """The names of the matrices of which there are samples."""
        return self._bits.keys()

    def looks(self, name: str) -> object:
        """Return the shape and the type of a matrix; None if it has no sample."""
        entry = self.entries[name] if name in self._bits else None
        return entry and (entry.shape, entry.source_dtype)

    def is_zero(self, name: str) -> bool:
        """Return whether all elements of a matrix's sample are zero."""
        return not decode(self._bits[name], self.entries[name].source_dtype).any()

    def count_differing(self, other: Samples, name: str) -> int:
        """Return how many elements of a matrix's samples differ in another save."""
        return int(np.count_nonzero(self._bits[name] != other._bits[name]))

    def is_equal_in(self, other: Samples, name: str) -> bool:
        """Return whether a whole matrix is bit for bit that of another save."""
        entries = self.entries[name], other.entries[name]
        return are_equal(*entries, self.save.survey.source, other.save.survey.source)

    def likeness(self, name: str, other: Samples, of: str = "") -> float:
        """Return the correlation of a matrix with one of another save; 0 if one has one value.

        The other matrix has the same name, or the name ``of``.
        """
        return float(self._unit(name) @ other._unit(of or name))

    def most_like(
        self, names: Iterable[str], other: Samples, candidates: Sequence[str]
    ) -> Iterator[tuple[str, float, str]]:
        """Yield each matrix, its largest correlation with candidates of another save, and whose."""
        units = np.stack([other._unit(candidate) for candidate in candidates])
        for name in names:
            likenesses = units @ self._unit(name)
            yield name, float(likenesses.max()), candidates[int(likenesses.argmax())]

    def is_finite(self, name: str) -> bool:
        """Return whether a sample has neither NaN nor infinite values, which are like nothing."""
        return bool(np.isfinite(self._numbers(name)).all())

    def size(self, name: str) -> int:
        """Return how many elements a sample has."""
        return int(self._bits[name].size)

    def _unit(self, name: str) -> Array:
        """Return a sample's numbers less their mean, as a vector of length 1, or of zeros."""
        if name not in self._units:
            with np.errstate(all="ignore"):
                numbers = self._numbers(name).astype(np.float64)
                numbers -= numbers.mean()
                length = float(np.sqrt(numbers @ numbers))
                unit = numbers / length if 0 < length < np.inf else np.zeros_like(numbers)
                self._units[name] = unit.astype(np.float32)
        return self._units[name]

    def _numbers(self, name: str) -> Array:
        return decode(self._bits[name], self.entries[name].source_dtype)


def _choose(slices: Slices, tensors: Mapping[str, TensorEntry], source: Files) -> Sequence[str]:
    """Return the names of the matrices, if there are many those of some from all over the model."""
    names = [name for name in slices.names if is_matrix(slices.shape(name, tensors))]
    return spread(names, _MOST_ASKED if source.policy.by_request else _MOST)


def spread(names: Sequence[str], most: int) -> Sequence[str]:
    """Return names from all over, about as many as ``most`` if there are more."""
    return names[:: max(1, -(-len(names) // most))]


def _box_in(shape: tuple[int, ...], at: int, longest: int) -> Box:
    """Return the box of a sample: the runs of a matrix from one of its eighths on."""
    sizes = sizes_of_run(shape, longest)
    low = [min(n * at // _PLACES, n - size) for n, size in zip(shape, sizes, strict=True)]
    return Box.at(low, sizes)


def sizes_of_run(shape: Sequence[int], longest: int) -> Sequence[int]:
    """Return the sizes of a box of at most so many elements that adjoin each other in a tensor."""
    sizes = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        sizes[dim] = max(1, min(shape[dim], longest))
        longest //= sizes[dim]
    return sizes


def read_boxes(boxes: Mapping[_Key, tuple[TensorEntry, Box]], source: Files) -> dict[_Key, Array]:
    """Return the bits of a box of each tensor, by the keys of these, as far as they can be read."""
    bits: dict[_Key, Array] = {}

    def take(key: _Key, tiles: Iterator[TensorTile]) -> None:
        with suppress(CkptoolError):  # the reader of all data reports on it
            for tile in tiles:
                bits[key] = tile.values.reshape(-1).copy()

    jobs = (_job(key, entry, box) for key, (entry, box) in boxes.items())
    read_tiles(TensorSource(source), jobs, take, source.policy.workers)
    return bits


def _job(key: _Key, entry: TensorEntry, box: Box) -> Job[_Key, TensorReader, TensorTile]:
    nbytes = box.volume * entry.source_dtype.itemsize

    def read(reader: TensorReader) -> Iterator[TensorTile]:
        yield TensorTile(box, reader.elements.read_stored(entry, box), nbytes)

    return Job(key, read, [partial(entry_needs, entry, [box])], nbytes)
