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

from ckptool.commands.verify.checks.meaning.stacks import Slice
from ckptool.commands.verify.checks.meaning.weights import is_matrix
from ckptool.core.catalog import TensorEntry
from ckptool.core.state_category import state_category
from ckptool.core.text import natural_key

_SORTED = ".safetensors"
"""The suffix of files whose tensors are in the order of their names."""

_LAYER = re.compile(r"(?s)(?:[^.\d][^.]*\.)*\d+(?=\.)")
"""What precedes and is the first number in a name."""
_NUMBER = re.compile("[0-9]{1,18}")
_STATE, _KINDS = "state", ("exp_avg", "exp_avg_sq")

Shape = tuple[int, ...]
Number = tuple[str, int]
"""The name of an optimizer's state, and the number of a parameter in it."""
Alike = Mapping[Shape, Sequence[object]]
Tensors = Mapping[str, TensorEntry]
_T = TypeVar("_T")


def states_by_name(states: Tensors, models: Tensors) -> Iterator[Slice]:
    """Yield the moments of numbered parameters, with the names that their parameters have."""
    numbered = _numbered(states)
    candidates = list(_candidates(models)) if numbered else []
    names: dict[Number, str] = {}
    for numbers in _by_optimizer(numbered, states):
        taken = {*names.values()}
        found = [_paired(numbers, known, taken) for known in candidates]
        best: dict[Number, str] = max(found, key=len, default={})
        names |= best
    for name, key in numbered.items():
        if key in names:
            kind = name.rpartition(".")[2]
            yield Slice(f"{key[0]}.{names[key]}.{kind}", name)


def misshapen(states: Tensors, models: Tensors) -> Iterator[tuple[str, Shape]]:
    """Yield the moments of one number in a shape that no matrix of the model has, and the shape
    that no number has, where all others have one each.

    No other model beside may fit. Where a dim is smaller, gradients may be projected.
    """
    numbered = _numbered(states)
    candidates = list(_candidates(models)) if numbered else []
    for numbers in _by_optimizer(numbered, states):
        odd = [(_more(known, numbers), _more(numbers, known)) for known in candidates]
        for lacking, extra in odd if all(extra for _, extra in odd) else ():
            if len(lacking) == len(extra) == 1 and not _is_smaller(extra[0], lacking[0]):
                own = numbers[extra[0]][0]
                yield from ((n, lacking[0]) for n, number in numbered.items() if number == own)


def _numbered(states: Tensors) -> dict[str, Number]:
    return {name: of for name in states if (of := _number_of(name)) is not None}


def _by_optimizer(
    numbered: Mapping[str, Number], states: Tensors
) -> Iterator[dict[Shape, list[Number]]]:
    """Yield the numbers of the matrices of each optimizer, by their shapes, in order."""
    optimizers: dict[str, dict[int, Shape]] = defaultdict(dict)
    for name, (optimizer, number) in numbered.items():
        if is_matrix(states[name].shape):
            optimizers[optimizer].setdefault(number, states[name].shape)
    for optimizer, shapes in optimizers.items():
        yield _by_shape(((optimizer, number), shapes[number]) for number in sorted(shapes))


def _more(some: Alike, others: Alike) -> list[Shape]:
    """Return the shapes of which one has more than another, as often as they are more."""
    more = ((shape, len(each) - len(others.get(shape, ()))) for shape, each in some.items())
    return [shape for shape, count in more for _ in range(count)]


def _is_smaller(own: Shape, whole: Shape) -> bool:
    return len(own) == len(whole) and all(a <= b for a, b in zip(own, whole, strict=True))


def _number_of(name: str) -> Number | None:
    """Return the optimizer's state that has a moment, and its parameter's number if it has one."""
    head, _, kind = name.rpartition(".")
    state, _, number = head.rpartition(".")
    is_moment = kind in _KINDS and state.rpartition(".")[2] == _STATE
    return (state, int(number)) if is_moment and _NUMBER.fullmatch(number) else None


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
