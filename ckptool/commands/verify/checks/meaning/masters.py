"""Weights of 16 bits beside their masters of 32 bits: each should be its master, rounded.

An optimizer steps the masters, and the weights are rounded from them. A resume takes the masters,
an export the weights: where they differ, the two are different models.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.verify.checks.elements import Elements
from ckptool.core.box import Box, is_run
from ckptool.core.catalog import Catalog, Place, TensorEntry
from ckptool.core.quantization.master_names import Mastered, mastered
from ckptool.core.text import list_some
from ckptool.core.views import part_at
from ckptool.engine.check.spans import Part, Probe
from ckptool.errors import Problem

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.master_bits import Difference
    from ckptool.engine.check.fingerprint import Printer, RunPrinter

_FEW = 2
_AVERAGE = re.compile(r"(?<![a-z])(ema|swa)(?![a-z])", re.IGNORECASE)


class _Pair(Struct, frozen=True):
    """The names of a weight and of its master, and what takes their fingerprints.

    The weight is the part at ``index`` of a stacked tensor; all of it if that is empty.
    """

    weight: str
    master: str
    index: tuple[int, ...]
    printers: tuple[Printer | RunPrinter, Printer | RunPrinter]

    @classmethod
    def of(cls, found: Mastered) -> _Pair:
        from ckptool.engine.check.fingerprint import Printer, RunPrinter

        depth = len(found.at)
        are_runs = _has_runs(found.weight, depth) and _has_runs(found.master, 0)
        kind = RunPrinter if are_runs else Printer
        printers = kind(found.weight.dtype), kind(found.weight.dtype)
        return cls(found.weight.name, found.master.name, found.at, printers)

    @property
    def name(self) -> str:
        """The name of the weight; one of a stack is named after its index."""
        return f"{self.weight}{list(self.index)}" if self.index else self.weight

    @property
    def is_equal(self) -> bool:
        one, other = self.printers
        return one.found == other.found

    def find(self, located: Mapping[str, TensorEntry]) -> tuple[TensorEntry, TensorEntry]:
        """Return the weight and its master."""
        weight = part_at(located[self.weight], self.index)
        return replace(weight, name=self.name), located[self.master]


class Masters:
    """The weights that have masters of their shape in a checkpoint, and whether they differ.

    Int16 remainders are no masters: with any weights they are the bits of some.
    """

    def __init__(self, catalog: Catalog) -> None:
        found = mastered(catalog.tensors, catalog.tensors, "float32")
        self._pairs = [_Pair.of(each) for each in found if not _is_one(each)]

    @property
    def probes(self) -> dict[str, Probe]:
        """What looks at each of the tensors while they are read."""
        probes: dict[str, Probe] = {pair.master: pair.printers[1] for pair in self._pairs}
        stacks: dict[str, dict[tuple[int, ...], Probe]] = defaultdict(dict)
        for pair in self._pairs:
            stacks[pair.weight][pair.index] = pair.printers[0]
        for name, printers in stacks.items():
            probes[name] = printers[()] if () in printers else _Stack(printers)
        return probes

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the weights that are not their masters rounded.

        Those whose fingerprints differ are read once more. What is in damaged files has problems
        of its own, and so have values that are not finite.
        """
        located = elements.located
        odd = [
            pair.find(located)
            for pair in self._pairs
            if not pair.is_equal and elements.are_sound(pair.weight, pair.master)
        ]
        if not odd:
            return
        from ckptool.commands.verify.checks.meaning.master_bits import (
            differences,
            other_way,
            similar,
        )

        found = self._without_another(differences(odd, elements.source))
        way, explained = other_way(found)
        if way is None and (file := _named_average(found, elements.source.root)):
            way, explained = f"averages, as {file} says, beside", similar(found)
        for each in found:
            if each not in explained:
                name = each.weight.name
                yield Problem(each.message, "weights-differ-from-masters", tensor=name)
        if way is not None and explained:
            names = [each.weight.name for each in explained]
            message = f"{list_some(names, _FEW)}: {way} masters, as the values show"
            yield Problem(message, "weights-rounded-otherwise", tensor=names[0])

    def _without_another(self, found: list[Difference]) -> list[Difference]:
        """Leave out the weights whose master has another: they may be averages beside the model."""
        differing = {each.weight.name for each in found}
        settled = {pair.master for pair in self._pairs if pair.name not in differing}
        return [each for each in found if each.master.name not in settled]


def _named_average(found: Sequence[Difference], root: str) -> str | None:
    """Return the name of a file or its folder that says that weights are averages (NeMo, EMA)."""
    files = (chunk.at.file for each in found for chunk in each.weight.chunks)
    names = {step for file in files for step in (posixpath.basename(root), *file.split("/"))}
    return next((name for name in sorted(names) if _AVERAGE.search(name)), None)


def _is_one(found: Mastered) -> bool:
    """Return whether a weight is its own master, as those of DeepSpeed are without ZeRO."""
    weight, _, master = found
    return weight.dtype == master.dtype and _boxes(weight) == _boxes(master)


def _has_runs(entry: TensorEntry, depth: int) -> bool:
    """Return whether all parts of a tensor are runs of it, or of each that is stacked in it."""
    boxes = (Box(chunk.box.lo[depth:], chunk.box.hi[depth:]) for chunk in entry.chunks)
    whole = Box.whole(entry.shape[depth:])
    return all(is_run(box, whole) for box in boxes)


def _boxes(entry: TensorEntry) -> list[tuple[Box, Place]]:
    return [(chunk.box, chunk.at) for chunk in entry.chunks]


class _Stack:
    """Shows each of the tensors that are stacked in one to its own printer, by its index."""

    def __init__(self, printers: Mapping[tuple[int, ...], Probe]) -> None:
        self._printers = printers
        self._depth = len(next(iter(printers)))

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Look at elements of a part, the first of which is its ``first``-th."""
        depth, itemsize = self._depth, part.dtype.itemsize
        outer, box = part.box.shape[:depth], Box(part.box.lo[depth:], part.box.hi[depth:])
        inner = Part(part.shape[depth:], box, part.dtype)
        end = first + len(data) // itemsize
        at = first
        while at < end:
            number, inside = divmod(at, box.volume)
            count = min(box.volume - inside, end - at)
            printer = self._printers.get(_index(number, outer, part.box.lo))
            if printer is not None and inner.shape:
                start = (at - first) * itemsize
                printer.take(data[start : start + count * itemsize], inner, inside)
            at += count


def _index(number: int, shape: tuple[int, ...], low: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the so-manyth of a box of ``shape`` that begins at ``low``."""
    index = []
    for dim in range(len(shape) - 1, -1, -1):
        number, at = divmod(number, shape[dim])
        index.append(at + low[dim])
    return tuple(reversed(index))
