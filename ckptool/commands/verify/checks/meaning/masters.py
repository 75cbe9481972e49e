"""Weights of 16 bits beside their masters of 32 bits: each should be its master, rounded.

An optimizer steps the masters, and the weights are rounded from them. A resume takes the masters,
an export the weights: where they differ, the two are different models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.meaning.stacks import Slice, probes_of
from ckptool.core.box import Box, is_run
from ckptool.core.catalog import Catalog, Place, TensorEntry
from ckptool.core.quantization.master_names import Mastered, mastered
from ckptool.core.state_category import AVERAGE
from ckptool.core.text import list_some
from ckptool.core.views import part_at
from ckptool.engine.check.spans import Probe
from ckptool.errors import Problem

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.master_bits import Difference
    from ckptool.engine.check.fingerprint import Printer, RunPrinter

_FEW = 2


class _Pair(Struct, frozen=True):
    """A weight, which may be stacked, the name of its master, and the printers of both."""

    weight: Slice
    master: str
    printers: tuple[Printer | RunPrinter, Printer | RunPrinter]

    @classmethod
    def of(cls, match: Mastered) -> _Pair:
        from ckptool.engine.check.fingerprint import Printer, RunPrinter

        depth = len(match.at)
        are_runs = _has_runs(match.weight, depth) and _has_runs(match.master, 0)
        kind = RunPrinter if are_runs else Printer
        printers = kind(match.weight.dtype), kind(match.weight.dtype)
        weight = Slice(match.weight.name, match.weight.name, match.at)
        return cls(weight, match.master.name, printers)

    @property
    def is_equal(self) -> bool:
        one, other = self.printers
        return one.found == other.found

    def find(self, located: Mapping[str, TensorEntry]) -> tuple[TensorEntry, TensorEntry]:
        """Return the weight and its master."""
        weight = part_at(located[self.weight.name], self.weight.at)
        return replace(weight, name=self.weight.label), located[self.master]


class Masters:
    """The weights that have masters of their shape in a checkpoint, and whether they differ.

    Int16 remainders are no masters: with any weights they make up the bits of some masters.
    """

    def __init__(self, catalog: Catalog) -> None:
        matches = mastered(catalog.tensors, catalog.tensors, "float32")
        self._pairs = [_Pair.of(match) for match in matches if not _is_own_master(match)]

    @property
    def probes(self) -> dict[str, Probe]:
        """What looks at each of the tensors while they are read."""
        masters: dict[str, Probe] = {pair.master: pair.printers[1] for pair in self._pairs}
        weights = ((pair.weight.name, pair.weight.at, pair.printers[0]) for pair in self._pairs)
        return masters | probes_of(weights)

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the weights that are not their masters rounded.

        Those whose fingerprints differ are read once more. What is in damaged files has problems
        of its own, and so have values that are not finite.
        """
        located = elements.located
        odd = [
            pair.find(located)
            for pair in self._pairs
            if not pair.is_equal and elements.are_sound(pair.weight.name, pair.master)
        ]
        if not odd:
            return
        from ckptool.commands.verify.checks.meaning.master_bits import (
            differences,
            other_way,
            similar,
        )

        deviations = self._without_another(differences(odd, elements.source))
        way, explained = other_way(deviations)
        weights = (deviation.weight for deviation in deviations)
        if way is None and (place := elements.place_named(AVERAGE, weights)):
            way, explained = f"averages, as {place} says, beside", similar(deviations)
        for deviation in deviations:
            if deviation not in explained:
                name = deviation.weight.name
                yield Problem(deviation.message, "weights-differ-from-masters", tensor=name)
        if way is not None and explained:
            names = [deviation.weight.name for deviation in explained]
            message = f"{list_some(names, _FEW)}: {way} masters, as the values show"
            yield Problem(message, "weights-rounded-otherwise", tensor=names[0])

    def _without_another(self, deviations: list[Difference]) -> list[Difference]:
        """Leave out averages beside the model: weights whose master has an equal weight, too."""
        differing = {deviation.weight.name for deviation in deviations}
        settled = {pair.master for pair in self._pairs if pair.weight.label not in differing}
        return [deviation for deviation in deviations if deviation.master.name not in settled]


def _is_own_master(match: Mastered) -> bool:
    """Return whether a weight is its own master, as those of DeepSpeed are without ZeRO."""
    weight, _, master = match
    return weight.dtype == master.dtype and _boxes(weight) == _boxes(master)


def _has_runs(entry: TensorEntry, depth: int) -> bool:
    """Return whether all chunks are runs of a tensor, or of each of those stacked in it."""
    boxes = (Box(chunk.box.lo[depth:], chunk.box.hi[depth:]) for chunk in entry.chunks)
    whole = Box.whole(entry.shape[depth:])
    return all(is_run(box, whole) for box in boxes)


def _boxes(entry: TensorEntry) -> list[tuple[Box, Place]]:
    return [(chunk.box, chunk.at) for chunk in entry.chunks]
