"""Matrices of a checkpoint, of its model or its optimizer, and what tells them from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import Survey
from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.checks.meaning.stacks import Index, is_matrix
from ckptool.commands.verify.checks.measures import (
    are_equal,
    count_moved,
    largest_sizes,
)
from ckptool.commands.verify.checks.optimizer_names import StateName
from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import lone_masters, state_category

SQUARES = frozenset(["exp_avg_sq", "square_avg", "state2"])
"""``state2`` is bitsandbytes'."""
ADAPTER = "lora"
"""In the names, in lower case, of all weights of an adapter."""
VISIBLE = 1e-6
"""A learning rate whose steps change some weight of any model, if divided by sizes of gradients."""
_VISIBLE_OF_GRADIENTS = 1e-2
"""The same for steps that are not divided, such as SGD's."""
_BESIDE = 0.02
"""The share of an optimizer's state that may be numbers of other shapes than its weights."""
SEEN = 8
"""How many weights a visible step changes at least: few of bf16, if none is near zero."""


class Matrices(Struct, frozen=True, dict=True):
    """Matrices of a save, by their names."""

    entries: Mapping[str, TensorEntry]
    survey: Survey

    def only(self, names: Iterable[str]) -> Matrices:
        """Return the matrices of these names."""
        return Matrices({name: self.entries[name] for name in names}, self.survey)

    @property
    def files(self) -> Set[str]:
        """The files that they are in."""
        return {chunk.at.file for entry in self.entries.values() for chunk in entry.chunks}

    @property
    def looks(self) -> Mapping[str, object]:
        """Their shapes and types, by their names."""
        return {name: (entry.shape, entry.source_dtype) for name, entry in self.entries.items()}

    @cached_property
    def visible_rate(self) -> float:
        """Return the least learning rate with which this state's steps are seen in weights."""
        is_scaled = any(StateName.of(name).kind in SQUARES for name in self.entries)
        return VISIBLE if is_scaled else _VISIBLE_OF_GRADIENTS

    @property
    def are_zero(self) -> bool:
        """Return whether all elements are, as far as matrices can be read; the smallest first."""
        source, opened = self.survey.source, filter(None, map(self.opened, self._smallest_first()))
        return not any(any(largest_sizes([entry], source).values()) for entry in opened)

    def _smallest_first(self) -> list[str]:
        return sorted(self.entries, key=lambda name: self.entries[name].elements)

    def are_moved_by(self, step: float) -> bool:
        """Return whether a step of this size changes elements, once rounded to their types."""
        opened = filter(None, map(self.opened, self.entries))
        return count_moved(opened, self.survey.source, step) >= SEEN

    def may_be_state_of(self, weights: Matrices) -> bool:
        """Return whether these may be state of weights: of their shapes, and of half as many.

        Some optimizers stack the state of weights of one shape (nanochat's Muon, ScaledAdam), and
        keep a few numbers beside it.
        """
        shapes = {entry.shape for entry in weights.entries.values()}
        entries = self.entries.values()
        alike = [e for e in entries if not shapes.isdisjoint([e.shape, e.shape[1:]])]
        count = sum(1 if entry.shape in shapes else entry.shape[0] for entry in alike)
        others = sum(e.elements for e in entries) - sum(e.elements for e in alike)
        is_all = others <= _BESIDE * sum(entry.elements for entry in alike)
        return is_all and 2 * count >= len(weights.entries) > 0

    def are_equal_to(self, other: Matrices) -> bool:
        """Return whether all are bit for bit those of their names in another save."""
        for name in self._smallest_first():
            entry, other_entry = self.opened(name), other.opened(name)
            sources = self.survey.source, other.survey.source
            if entry is None or other_entry is None or not are_equal(entry, other_entry, *sources):
                return False
        return True

    def opened(self, name: str) -> TensorEntry | None:
        """Return the entry of a matrix with its containers opened, None if they cannot be."""
        return locate_whole(self.survey, [name]).get(name)


def matrices_of(
    survey: Survey, part: str, has_shape: Callable[[Index], bool] = is_matrix
) -> Matrices:
    """Return the matrices, or the tensors of another shape, of a ``part``: model or optimizer.

    Masters that are a parameter's only weight are of the model.
    """
    catalog = survey.catalog
    if catalog is None:
        return Matrices({}, survey)
    tensors = {n: e for n, e in catalog.tensors.items() if has_shape(e.shape)}
    for name in tensors.keys() & lone_masters(catalog):
        tensors[name] = replace(tensors[name], part="model")
    return Matrices({n: e for n, e in tensors.items() if state_category(e) == part}, survey)
