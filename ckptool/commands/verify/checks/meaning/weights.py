"""Weights that no training leaves: all zero or of one value, too small, those of another layer.

What is odd is so beside most of its like: what differs by numbers alone, in one shape, and has the
many values of what was trained. Kinds that begin as zeros are so in all layers, and of two layers
none is the odd one.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.meaning.masters import without_averages
from ckptool.commands.verify.checks.meaning.numbered import states_by_name
from ckptool.commands.verify.checks.meaning.stacks import Entries, Slice, Slices, is_matrix
from ckptool.commands.verify.checks.optimizer_names import StateName, moments_in
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.keymap.model import abstract
from ckptool.core.quantization.master_names import keys_of, parameter_of
from ckptool.core.state_category import is_master, state_category
from ckptool.engine.check.spans import Probe
from ckptool.errors import Problem
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.engine.check.weight_bits import Weight

_SEVERAL = 2
"""Kinds of matrices that do not all begin as zeros."""
BEGINS_ZERO = re.compile(r"lora|hada_|lokr_|oft_|adapter|zero_conv", re.I)
"""Of names of weights that begin as zeros, and stay so in an expert that is never chosen."""
_FIRST_HALF = re.compile(r"(?<![a-zA-Z])lora[._](A|a|down)(?![a-zA-Z])")
SECOND_HALF = re.compile(r"(?<![a-zA-Z])lora[._](B|b|up)(?![a-zA-Z])")
"""The half of LoRA that begins as random numbers, and that of zeros (PEFT, torchtune, kohya)."""
_SECOND_OF = {"A": "B", "a": "b", "down": "up"}
_NUMBER, _DIGITS = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)"), 9
"""A number that is all between dots, as a layer's is: that of ``fc1`` is part of a name."""
_OUTPUT = re.compile(
    r"\.(?:(?:o|out|down|c|linear)_?proj|proj(?:_out)?|(?:linear_)?fc2|w[2o]|dense(?:_4h_to_h)?)\b"
)
"""Names of matrices whose products are added to what goes through a layer, of attention and MLP."""
_ATTENTION = re.compile(r"attn|attention", re.I)
_ZERO = "weight-zero"
_NORM = re.compile(r"norm|\bln", re.I)
_SMALL = 0.5
"""What the norms of a model exceed, and those of a difference of two models do not."""
_DIFFERENCE = re.compile(
    r"(?<![a-z])(?:deltas?|diff(?:erence)?s?|task[-_]?vectors?)(?![a-z])", re.I
)
_DIFFERENCES = (_DIFFERENCE, BEGINS_ZERO)
_COPIED = "expert"
"""Of names of weights that are copied from one another when a model is made larger."""

Seen = Mapping[str, "Weight"]
Shape = tuple[int, ...]
_Layer = tuple[str, int]
"""What precedes the number of a layer, and it."""


class Weights:
    """The matrices of a model, by the names that they have if none are stacked.

    A master stands for a weight that is not stored, as where ranks share all there is (ZeRO 3).
    """

    def __init__(self, catalog: Catalog) -> None:
        tensors = {name: entry for name, entry in catalog.tensors.items() if is_weight(entry)}
        self._slices = Slices(tensors, _masters_alone(catalog))
        matrices = {
            name: catalog.tensors[self._slices.tensor(name)].source_dtype
            for name in self._slices.names
            if is_matrix(self._slices.shape(name, catalog.tensors))
        }
        self._found = _looked_at(matrices) if matrices else {}

    @property
    def probes(self) -> Mapping[str, Probe]:
        """What looks at each of the weights."""
        return self._slices.probes(self._found)

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the weights that are odd beside their like."""
        if not self._may_be_odd():
            return  # names are not looked at, of which there may be a hundred thousand
        shapes = self._shapes(elements)
        seen = {name: self._found[name] for name in shapes}
        own = without_averages(seen)
        if len(own) >= _SEVERAL and all(weight.first == 0 for weight in own.values()):
            yield from self._of_zeros(elements, {name: shapes[name] for name in own})
            return
        kinds: dict[tuple[str, Shape], list[str]] = defaultdict(list)
        for name, shape in shapes.items():
            kind = abstract(name)[0]
            if kind and (not BEGINS_ZERO.search(name) or _FIRST_HALF.search(name)):
                kinds[kind, shape].append(name)
        with_moments = _with_moments(elements.located)
        trained = {name for name in seen if self._slices[name].name in with_moments}
        stacked = {name: weight for name, weight in seen.items() if self._slices[name].at}
        rightly = _rightly_zero(seen, trained) | _padding(stacked) | _beside_zeros(seen)
        odd = [(kind, *each) for (kind, _), n in kinds.items() for each in _odd(n, seen, rightly)]
        zero = [self._slices[name].name for _, name, code, _ in odd if code == _ZERO]
        is_difference = bool(zero) and _is_difference(zero, elements)
        for kind, name, code, what in odd:
            if not is_difference or code != _ZERO:
                each = self._slices[name]
                message = f"{each.label}: {what} others like {kind}"
                yield Problem(message, code, tensor=each.name)
        not_finite = elements.content.read.not_finite
        entries = Entries(self._slices, elements.located)
        for one, other, pairs in _alike_layers(shapes, seen):
            if any(self._slices.tensor(name) in not_finite for _, name in pairs):
                continue  # that has a finding of its own
            both = ((entries[name], entries[like]) for name, like in pairs)
            if all(_are_equal(*each, elements.source) for each in both):
                message = f"{other[0]}{other[1]}: its {len(pairs):,} matrices are those of"
                message += f" {one[0]}{one[1]}, bit for bit"
                yield Problem(message, "layers-equal", tensor=self._slices.tensor(pairs[0][1]))

    def _of_zeros(self, elements: Elements, shapes: Mapping[str, Shape]) -> Iterator[Problem]:
        """Yield a problem for a model that is all zero, unless a name calls it a difference.

        An adapter of PEFT's MiSS begins so, and only its file is called one.
        """
        first, located = self._slices[next(iter(shapes))], elements.located
        entries = [located[self._slices.tensor(name)] for name in shapes]
        kinds = {
            (_NUMBER.sub("#", name), shape)
            for name, shape in shapes.items()
            if not BEGINS_ZERO.search(name)
        }
        is_difference = any(elements.place_named(each, entries) for each in _DIFFERENCES)
        if len(kinds) < _SEVERAL or is_difference:
            return
        message = f"{first.label}: all values are zero, as are those of all {len(shapes):,}"
        yield Problem(f"{message} matrices of the model", _ZERO, tensor=first.name)

    def _shapes(self, elements: Elements) -> dict[str, Shape]:
        """Return the shapes of the weights that were seen whole."""
        shapes: dict[str, Shape] = {}
        for name, weight in self._found.items():
            if elements.are_sound(self._slices.tensor(name)):
                shape = self._slices.shape(name, elements.located)
                if weight.elements == math.prod(shape):
                    shapes[name] = shape
        return shapes

    def _may_be_odd(self) -> bool:
        """Return whether a weight looks odd by itself, or begins as another one does."""
        looked = self._found.values()
        heads = [each.head for each in looked if each.head is not None and each.first is None]
        return len(set(heads)) < len(heads) or any(each.oddity for each in looked)


def _are_equal(one: TensorEntry, other: TensorEntry, source: Files) -> bool:
    """Return whether two tensors have the same bits, but not in one place, as of tied layers."""
    from ckptool.commands.verify.checks.meaning.moment_bits import are_equal

    places = [[(chunk.box, chunk.at) for chunk in each.chunks] for each in (one, other)]
    return places[0] != places[1] and are_equal(one, other, source)


def _looked_at(matrices: Mapping[str, DType]) -> dict[str, Weight]:
    """Return what looks at each matrix; numpy is imported for none."""
    from ckptool.engine.check.weight_bits import Weight

    return {name: Weight(dtype) for name, dtype in matrices.items()}


def is_weight(entry: TensorEntry) -> bool:
    """Return whether a tensor is of numbers of a model."""
    return entry.source_dtype.kind == "float" and state_category(entry) == "model"


def _masters_alone(catalog: Catalog) -> Iterator[Slice]:
    """Yield the masters of weights that are not stored, by the names of these."""
    for name in filter(is_master, catalog.tensors):
        parameter = parameter_of(name)
        keys = (key for key, _ in keys_of(parameter)) if parameter else ()
        if parameter and catalog.tensors.keys().isdisjoint(keys):
            yield Slice(parameter, name)


def _odd(
    names: Sequence[str], seen: Seen, rightly: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the few weights of a kind that are all zero, of one value, or nearly all denormal.

    Each with the code of that, and words of it.
    """
    odd: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if (oddity := seen[name].oddity) and name not in rightly:
            odd[oddity[0]][name] = oddity[1]
    for code, found in odd.items():
        others = sum(seen[name].is_varied for name in names if name not in found)
        if others >= 2 and 2 * others > len(names):
            for name, what in found.items():
                yield name, code, f"{what}, but of none of {others:,}"


def _is_difference(zero: Iterable[str], elements: Elements) -> bool:
    """Return whether weights are those of a difference of two models, as a name or norms say.

    What was not trained is zero there, and norms are not those of any model.
    """
    located = elements.located
    if elements.place_named(_DIFFERENCE, (located[name] for name in zero)):
        return True
    from ckptool.commands.verify.checks.meaning.moment_bits import largest_sizes

    named = (entry for name, entry in located.items() if _NORM.search(name))
    norms = (entry for entry in named if is_weight(entry) and not entry.name.endswith("bias"))
    sizes = largest_sizes(norms, elements.source)
    return bool(sizes) and max(sizes.values()) < _SMALL


def _with_moments(located: Mapping[str, TensorEntry]) -> set[str]:
    """Return the weights that an optimizer has moments of."""
    moments = {name: located[name] for name, _ in moments_in(located)}
    named = (each.numbered for each in states_by_name(moments, located))
    parameters = {StateName.of(name).parameter for name in (*moments, *named)}
    models = models_by_tail(located) if parameters else {}
    return {models[parameter].name for parameter in parameters if parameter in models}


def _rightly_zero(seen: Seen, trained: Collection[str]) -> set[str]:
    """Return the matrices that may be zero for a reason.

    Some of several layers, the same of each; or of one all whose products are added to what goes
    on, as of blocks that are added to a model, or those of attention, if they are not trained.
    """
    layers = layers_of(seen)
    zero = _zero_of(layers, seen)
    alike = Counter(kinds for layer, kinds in zero.items() if kinds != layers[layer].keys())
    found = {layer for layer, kinds in zero.items() if alike[kinds] > 1}
    for layer, kinds in zero.items():
        outputs = {kind for kind in layers[layer] if _OUTPUT.search(kind)}
        added = {kind for kind in outputs if _ATTENTION.search(kind)}
        is_frozen = all(layers[layer][kind] not in trained for kind in kinds)
        if (len(kinds) > 1 and kinds == outputs) or (kinds <= added and is_frozen):
            found.add(layer)
    rightly = {layers[layer][kind] for layer in found for kind in zero[layer]}
    return rightly | _filling(seen)


def _beside_zeros(seen: Seen) -> set[str]:
    """Return the first halves of LoRA whose second one is zero, too: no adapter was there."""
    halves = (match for match in map(_FIRST_HALF.search, seen) if match)
    return {half.string for half in halves if _is_zero(_second_half(half), seen)}


def _second_half(first: re.Match[str]) -> str:
    name, (start, stop) = first.string, first.span(1)
    return name[:start] + _SECOND_OF[first[1]] + name[stop:]


def _is_zero(name: str, seen: Seen) -> bool:
    return name not in seen or seen[name].first == 0


def _zero_of(
    layers: Mapping[_Layer, Mapping[str, str]], seen: Seen
) -> dict[_Layer, frozenset[str]]:
    """Return the kinds of each layer's matrices that are all zero."""
    return {
        layer: frozenset(kind for kind, name in names.items() if seen[name].first == 0)
        for layer, names in layers.items()
    }


def _padding(stacked: Seen) -> set[str]:
    """Return what is of the last layers of stacks if they are all zero, to fill stages up."""
    layers = layers_of(stacked)
    zero = _zero_of(layers, stacked)
    last: list[str] = []
    for head, ordered in groupby(sorted(layers), key=itemgetter(0)):
        whole = takewhile(lambda at: zero[at] == layers[at].keys(), reversed(list(ordered)))
        last += [f"{head}{number}." for _, number in whole]
    return {name for name in stacked if last and name.startswith(tuple(last))}


def _filling(seen: Seen) -> set[str]:
    """Return the experts that are zero in each layer that has any, as what fills ranks up is."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in seen:
        numbers = [*_NUMBER.finditer(name)] if _COPIED in name else []
        for expert in numbers[-1:]:
            head = _NUMBER.sub("#", name[: expert.start()])
            alike[head + expert[0]].append(name)
    zero = (names for names in alike.values() if all(seen[name].first == 0 for name in names))
    return {name for names in zero if len(names) > 1 for name in names}


def _alike_layers(
    shapes: Mapping[str, Shape], seen: Seen
) -> Iterator[tuple[_Layer, _Layer, list[tuple[str, str]]]]:
    """Yield the few layers that begin as another one does, it first, with the pairs of matrices."""
    layers = layers_of(seen)
    heads: dict[object, list[_Layer]] = defaultdict(list)
    for layer, names in layers.items():
        looks = {(kind, shapes[n], seen[n].head) for kind, n in names.items()}
        known = (seen[n].head is not None and seen[n].first is None for n in names.values())
        if len(names) > 1 and all(known):
            heads[frozenset(looks)].append(layer)
    pairs = [pair for alike in heads.values() for pair in pairwise(alike)]
    if 2 * len(pairs) >= len(layers):
        return
    for one, other in pairs:
        yield one, other, [(layers[one][kind], name) for kind, name in layers[other].items()]


def layers_of(names: Iterable[str]) -> dict[_Layer, dict[str, str]]:
    """Return the names of the matrices of each layer, by their kinds."""
    layers: dict[_Layer, dict[str, str]] = defaultdict(dict)
    for name in names:
        numbers = _NUMBER.findall(name)
        if len(numbers) == 1 and len(numbers[0]) <= _DIGITS and _COPIED not in name:
            kind = _NUMBER.sub("#", name)
            layers[kind.partition("#")[0], int(numbers[0])][kind] = name
    return layers


def are_of_a_branch(lost: Collection[str], others: Iterable[str]) -> bool:
    """Return whether what a layer lacks is of other modules than what it has, as if not used.

    One weight alone is not: what it is computed with has gradients.
    """
    lacking, having = ({_module_of(name) for name in names} for names in (lost, others))
    return len(lost) > 1 and lacking.isdisjoint(having)


def _module_of(name: str) -> Sequence[str]:
    """Return the name that follows a layer's number."""
    return tuple(_NUMBER.split(name, maxsplit=1)[-1].split(".")[:2])
