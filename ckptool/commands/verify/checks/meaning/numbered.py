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
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import state_category
from ckptool.core.text import natural_key

_NUMBERED = MOMENTS | {MOMENTUM}
_SORTED = ".safetensors"
"""The suffix of files whose tensors are in the order of their names."""

_LAYER = re.compile(r"(?s)(?:[^.\d][^.]*\.)*\d+(?=\.)")
"""The beginning of a name up to its first number."""
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
        groups = _by_shape(((optimizer, number), shapes[number]) for number in sorted(shapes))
        other_weights = {*names.values()}
        pairings = [_pair_names(groups, matrices, other_weights) for matrices in candidates]
        best: dict[tuple[str, int], str] = max(pairings, key=len, default={})
        names |= best
    for name, key in numbered.items():
        if key in names:
            kind = name.rpartition(".")[2]
            yield Slice(f"{key[0]}.{names[key]}.{kind}", name)


def weight_of_each(states: Tensors, models: Tensors) -> dict[str, str]:
    """Return the weight that each state is of, by their names, as far as it is known."""
    by_tail = models_by_tail(models)
    numbered = {state.name: state.numbered for state in states_by_name(states, models)}
    parameters = {name: StateName.of(numbered.get(name, name)).parameter for name in states}
    return {name: by_tail[of].name for name, of in parameters.items() if of in by_tail}


def _number_of(name: str) -> tuple[str, int] | None:
    """Return what precedes a moment's parameter in the name, and its number, if it has one."""
    of = StateName.of(name)
    is_of_torch = of.kind in _NUMBERED and of.is_inside and not of.by_kind
    if not is_of_torch or not _NUMBER.fullmatch(of.parameter):
        return None
    return name.removesuffix(f".{of.parameter}.{of.kind}"), int(of.parameter)


def _candidates(models: Tensors) -> Iterator[Mapping[Shape, Sequence[str]]]:
    """Yield matrices by shape: of all that is a model, and of what each first step of names holds.

    A file may hold several models, such as averages. Of tied weights the first name counts.
    """
    groups: dict[str, dict[object, TensorEntry]] = defaultdict(dict)
    for entry in models.values():
        if entry.source_dtype.kind == "float" and state_category(entry) == "model":
            place = next(((c.at.file, c.at.offset) for c in entry.chunks), entry.name)
            for group in ("", entry.name.partition(".")[0]):
                groups[group].setdefault(place, entry)
    for tensors in groups.values():
        entries = [entry for entry in tensors.values() if is_matrix(entry.shape)]
        matrices = _by_shape((entry.name, entry.shape) for entry in entries)
        if any(c.at.file.endswith(_SORTED) for entry in entries for c in entry.chunks[:1]):
            ordered = ((shape, sorted(names, key=natural_key)) for shape, names in matrices.items())
            matrices = {shape: names for shape, names in ordered if _are_in_all_layers(names)}
        yield matrices


def _are_in_all_layers(names: Iterable[str]) -> bool:
    """Return whether all layers have the same tensors, by what follows the layer's number."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.match(name)
        layers[name[: match.end()] if match else name].append(name[match.end() :] if match else "")
    return len({tuple(rest) for rest in layers.values()}) == 1


def _by_shape(shapes: Iterable[tuple[_T, Shape]]) -> dict[Shape, list[_T]]:
    groups: dict[Shape, list[_T]] = defaultdict(list)
    for item, shape in shapes:
        groups[shape].append(item)
    return groups


def _pair_names(
    numbered: Mapping[Shape, Sequence[_T]],
    models: Mapping[Shape, Sequence[str]],
    other_weights: Collection[str],
) -> dict[_T, str]:
    """Return the names of numbered parameters of a shape of which the model has as many matrices.

    None is among ``other_weights``, which another optimizer has.
    """
    pairs = ((keys, models.get(shape, ())) for shape, keys in numbered.items())
    return {
        key: name
        for keys, names in pairs
        if len(keys) == len(names)
        for key, name in zip(keys, names, strict=True)
        if name not in other_weights
    }
