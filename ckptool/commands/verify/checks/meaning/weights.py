"""Weights that no training leaves: all zero or of one value, too small, those of another layer.

What is odd is so beside most of its like: what differs by numbers alone, in one shape, and has the
many values of what was trained. Kinds that begin as zeros are so in all layers, and of two layers
none is the odd one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptool.commands.verify.checks.elements import Elements
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.state_category import state_category
from ckptool.engine.check.spans import Probe
from ckptool.errors import Problem

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.weight_bits import Weight

_LEAST = 64
"""Elements of a matrix that are not equal by chance."""
_BEGINS_ZERO = "lora"
"""Of names of weights that begin as zeros, and stay so in an expert that is never chosen."""
_COPIED = "expert"
"""Of names of weights that are copied from one another when a model is made larger."""

Seen = Mapping[str, "Weight"]
_Layer = tuple[str, int]
"""What precedes the number of a layer, and it."""


class Weights:
    """The matrices of a model, by their names."""

    def __init__(self, catalog: Catalog) -> None:
        self._found: dict[str, Weight] = {}
        for name, entry in catalog.tensors.items():
            if _is_matrix(entry):
                from ckptool.commands.verify.checks.meaning.weight_bits import Weight

                self._found[name] = Weight(entry.source_dtype)

    @property
    def probes(self) -> Mapping[str, Probe]:
        """What looks at each of the weights."""
        return self._found

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the weights that are odd beside their like."""
        if not self._may_be_odd():
            return  # names are not looked at, of which there may be a hundred thousand
        located = elements.located
        seen = {
            name: weight
            for name, weight in self._found.items()
            if elements.are_sound(name) and weight.elements == located[name].elements
        }
        kinds: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
        for name in seen:
            kind, shape = abstract(name)[0], located[name].shape
            if kind and _BEGINS_ZERO not in name.lower():
                kinds[kind, shape].append(name)
        rightly = _rightly_zero(seen)
        for (kind, _), names in kinds.items():
            yield from _odd(kind, names, seen, rightly)
        yield from _equal_layers(seen, elements)

    def _may_be_odd(self) -> bool:
        """Return whether a weight looks odd by itself, or begins as another one does."""
        looked = self._found.values()
        heads = [each.head for each in looked if each.head is not None and each.first is None]
        return len(set(heads)) < len(heads) or any(each.oddity for each in looked)


def _is_matrix(entry: TensorEntry) -> bool:
    is_matrix = sum(size > 1 for size in entry.shape) > 1 and entry.elements >= _LEAST
    return is_matrix and entry.source_dtype.kind == "float" and state_category(entry) == "model"


def _odd(
    kind: str, names: Sequence[str], seen: Seen, rightly: Collection[str]
) -> Iterator[Problem]:
    """Yield the few weights of a kind that are all zero, of one value, or nearly all denormal."""
    odd: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if (oddity := seen[name].oddity) and name not in rightly:
            odd[oddity[0]][name] = oddity[1]
    for code, found in odd.items():
        others = sum(seen[name].is_varied for name in names if name not in found)
        if others < 2 or 2 * others <= len(names):
            continue
        for name, what in found.items():
            message = f"{name}: {what}, but of none of {others:,} others like {kind}"
            yield Problem(message, code, tensor=name)


def _rightly_zero(seen: Seen) -> set[str]:
    """Return the matrices that may be zero for a reason.

    Some of several layers, the same of each, as of blocks that are added to a model; and all of the
    first few layers, which were frozen, in a difference of two models.
    """
    layers = _layers_of(seen)
    zero = {
        layer: frozenset(kind for kind, name in names.items() if seen[name].first == 0)
        for layer, names in layers.items()
    }
    alike = Counter(kinds for layer, kinds in zero.items() if kinds != layers[layer].keys())
    found = {layer for layer, kinds in zero.items() if alike[kinds] > 1}
    for _, ordered in groupby(sorted(layers), key=itemgetter(0)):
        frozen = list(takewhile(lambda layer: zero[layer] == layers[layer].keys(), ordered))
        found.update(frozen if len(frozen) > 1 else ())
    return {layers[layer][kind] for layer in found for kind in zero[layer]}


def _equal_layers(seen: Seen, elements: Elements) -> Iterator[Problem]:
    """Yield the few layers all of whose matrices are those of another one, bit for bit."""
    layers = _layers_of(seen)
    heads: dict[object, list[_Layer]] = defaultdict(list)
    for layer, names in layers.items():
        looks = {(kind, elements.located[n].shape, seen[n].head) for kind, n in names.items()}
        known = (seen[n].head is not None and seen[n].first is None for n in names.values())
        if len(names) > 1 and all(known):
            heads[frozenset(looks)].append(layer)
    pairs = [pair for alike in heads.values() for pair in pairwise(alike)]
    if 2 * len(pairs) >= len(layers):
        return
    for one, other in pairs:
        matrices = [(layers[one][kind], name) for kind, name in layers[other].items()]
        if all(_are_equal(*pair, elements) for pair in matrices):
            message = f"{other[0]}{other[1]}: its {len(matrices):,} matrices are those of"
            message += f" {one[0]}{one[1]}, bit for bit"
            yield Problem(message, "layers-equal", tensor=matrices[0][1])


def _layers_of(names: Iterable[str]) -> dict[_Layer, dict[str, str]]:
    """Return the names of the matrices of each layer, by their kinds."""
    layers: dict[_Layer, dict[str, str]] = defaultdict(dict)
    for name in names:
        kind, numbers = abstract(name)
        if len(numbers) == 1 and _COPIED not in name:
            layers[kind.partition("#")[0], numbers[0]][kind] = name
    return layers


def _are_equal(one: str, other: str, elements: Elements) -> bool:
    from ckptool.commands.verify.checks.meaning.moment_bits import are_equal

    both = elements.located[one], elements.located[other]
    places = [[(chunk.box, chunk.at) for chunk in each.chunks] for each in both]
    return places[0] != places[1] and are_equal(*both, elements.source)
