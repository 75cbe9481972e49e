"""Names of the parameters that an optimizer knows by number alone, from the order of the model's.

torch's optimizers number parameters in the order in which they were given, which is that of the
model. So of as many matrices of a shape as the model has, each is the one at its place among them.
Where the model's order is lost, as safetensors sorts names, all layers must have the same matrices
of a shape: then one may be taken for another, but of its own layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ckptool.commands.verify.checks.meaning.stacks import Slice, is_matrix
from ckptool.commands.verify.checks.optimizer_names import MOMENTS, MOMENTUM, StateName
from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import state_category
from ckptool.core.text import natural_key

_NUMBERED = MOMENTS | {MOMENTUM}
_SORTED = ".safetensors"
"""The suffix of files whose tensors are in the order of their names."""

_LAYER = re.compile(r"(?s)(?:[^.\d][^.]*\.)*\d+(?=\.)")
"""What precedes and is the first number in a name."""
_NUMBER = re.compile("[0-9]{1,18}")

Shape = tuple[int, ...]
Tensors = Mapping[str, TensorEntry]
_T = TypeVar("_T")


def states_by_name(states: Tensors, models: Tensors) -> Iterator[Slice]:
    """Yield the moments of numbered parameters, with the names that their parameters have."""
    numbered = {name: of for name in states if (of := _number_of(name)) is not None}
    if not numbered:
        return
    optimizers: dict[str, dict[int, Shape]] = defaultdict(dict)
    for name, (optimizer, number) in numbered.items():
        if is_matrix(states[name].shape):
            optimizers[optimizer].setdefault(number, states[name].shape)
    candidates = list(_candidates(models))
    names: dict[tuple[str, int], str] = {}
    for optimizer, shapes in optimizers.items():
        alike = _by_shape(((optimizer, number), shapes[number]) for number in sorted(shapes))
        taken = {*names.values()}
        found = [_paired(alike, known, taken) for known in candidates]
        best: dict[tuple[str, int], str] = max(found, key=len, default={})
        names |= best
    for name, key in numbered.items():
        if key in names:
            kind = name.rpartition(".")[2]
            yield Slice(f"{key[0]}.{names[key]}.{kind}", name)


def _number_of(name: str) -> tuple[str, int] | None:
    """Return what precedes a moment's parameter, and the number of that if it has one."""
    of = StateName.of(name)
    is_of_torch = of.kind in _NUMBERED and of.is_inside and not of.by_kind
    if not is_of_torch or not _NUMBER.fullmatch(of.parameter):
        return None
    return name.removesuffix(f".{of.parameter}.{of.kind}"), int(of.parameter)


def _candidates(models: Tensors) -> Iterator[Mapping[Shape, Sequence[str]]]:
    """Yield the matrices of all that is a model, and of what each first step of names holds.

    A file may have several, such as averages. Of tied weights the first name counts.
    """
    groups: dict[str, dict[object, TensorEntry]] = defaultdict(dict)
    for entry in models.values():
        if entry.source_dtype.kind == "float" and state_category(entry) == "model":
            place = next(((c.at.file, c.at.offset) for c in entry.chunks), entry.name)
            for group in ("", entry.name.partition(".")[0]):
                groups[group].setdefault(place, entry)
    for found in groups.values():
        entries = [entry for entry in found.values() if is_matrix(entry.shape)]
        alike = _by_shape((entry.name, entry.shape) for entry in entries)
        if any(c.at.file.endswith(_SORTED) for entry in entries for c in entry.chunks[:1]):
            ordered = ((shape, sorted(names, key=natural_key)) for shape, names in alike.items())
            alike = {shape: names for shape, names in ordered if _are_in_all_layers(names)}
        yield alike


def _are_in_all_layers(names: Iterable[str]) -> bool:
    """Return whether all layers have the same of some tensors, by what follows their numbers."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found = _LAYER.match(name)
        layers[name[: found.end()] if found else name].append(name[found.end() :] if found else "")
    return len({tuple(rest) for rest in layers.values()}) == 1


def _by_shape(shapes: Iterable[tuple[_T, Shape]]) -> dict[Shape, list[_T]]:
    alike: dict[Shape, list[_T]] = defaultdict(list)
    for each, shape in shapes:
        alike[shape].append(each)
    return alike


def _paired(
    numbered: Mapping[Shape, Sequence[_T]],
    models: Mapping[Shape, Sequence[str]],
    taken: Collection[str],
) -> dict[_T, str]:
    """Return the names of those numbered of whose shape a model has as many matrices.

    None is one ``taken`` by another optimizer.
    """
    pairs = ((alike, models.get(shape, ())) for shape, alike in numbered.items())
    return {
        each: name
        for alike, names in pairs
        if len(alike) == len(names)
        for each, name in zip(alike, names, strict=True)
        if name not in taken
    }
