"""Weights that no training leaves: all zero or of one value, too small, those of another layer.

A weight is odd beside most others of its kind: those of one shape whose names differ by numbers
alone, and which have the many values of trained weights. Kinds that begin as zeros are zero in all
layers, and of two layers neither is the odd one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.meaning.numbered import weight_of_each
from ckptool.commands.verify.checks.meaning.stacks import Entries, Slice, Slices, is_matrix
from ckptool.commands.verify.checks.measures import are_equal, largest_sizes
from ckptool.commands.verify.checks.optimizer_names import moments_in
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.keymap.model import abstract
from ckptool.core.quantization.master_names import keys_of, parameter_of
from ckptool.core.state_category import is_master, state_category, without_averages
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

ByName = Mapping[str, "Weight"]
Shape = tuple[int, ...]
_Layer = tuple[str, int]
"""What precedes the number of a layer, and the number."""


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
        self._weights = _weights_of(matrices) if matrices else {}

    @property
    def probes(self) -> Mapping[str, Probe]:
        """What looks at each of the weights."""
        return self._slices.probes(self._weights)

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the weights that are odd beside others of their kind."""
        if not self._may_be_odd():
            return  # names are not looked at, of which there may be a hundred thousand
        shapes = self._slices.seen_whole(self._weights, elements)
        weights = {name: self._weights[name] for name in shapes}
        model = without_averages(weights)
        if len(model) >= _SEVERAL and all(weight.first == 0 for weight in model.values()):
            yield from self._check_zeros(elements, {name: shapes[name] for name in model})
            return
        kinds: dict[tuple[str, Shape], list[str]] = defaultdict(list)
        for name, shape in shapes.items():
            kind, half = abstract(name)[0], _FIRST_HALF.search(name)
            # none is zero that is used, so all are of one kind, but for embeddings: those begin so
            if half is not None and "embed" not in name.lower():
                kinds[half[0], ()].append(name)
            elif kind and not BEGINS_ZERO.search(name):
                kinds[kind, shape].append(name)
        moments = {name: elements.located[name] for name, _ in moments_in(elements.located)}
        with_moments = {*weight_of_each(moments, elements.located).values()}
        trained = {name for name in weights if self._slices[name].name in with_moments}
        stacked = {name: weight for name, weight in weights.items() if self._slices[name].at}
        exempt = _may_be_zero(weights, trained) | _padding_layers(stacked) | _unused_halves(weights)
        odd = [(kind, *o) for (kind, _), n in kinds.items() for o in _odd(n, weights, exempt)]
        zero = [self._slices[name].name for _, name, code, _ in odd if code == _ZERO]
        is_difference = bool(zero) and _is_difference(zero, elements)
        for kind, name, code, what in odd:
            if not is_difference or code != _ZERO:
                part = self._slices[name]
                message = f"{part.label}: {what} others like {kind}"
                yield Problem(message, code, tensor=part.name)
        not_finite = elements.content.read.not_finite
        entries = Entries(self._slices, elements.located)
        for one, other, pairs in _twin_layers(shapes, weights):
            if any(self._slices.tensor(name) in not_finite for _, name in pairs):
                continue  # that has a finding of its own
            entry_pairs = ((entries[name], entries[twin]) for name, twin in pairs)
            if all(_are_equal(*pair, elements.source) for pair in entry_pairs):
                message = f"{other[0]}{other[1]}: its {len(pairs):,} matrices are those of"
                message += f" {one[0]}{one[1]}, bit for bit"
                yield Problem(message, "layers-equal", tensor=self._slices.tensor(pairs[0][1]))

    def _check_zeros(self, elements: Elements, shapes: Mapping[str, Shape]) -> Iterator[Problem]:
        """Yield a problem for a model that is all zero, unless a name calls it a difference.

        An adapter of PEFT's MiSS begins as zeros, and only its file is called an adapter.
        """
        first, located = self._slices[next(iter(shapes))], elements.located
        entries = [located[self._slices.tensor(name)] for name in shapes]
        kinds = {
            (_NUMBER.sub("#", name), shape)
            for name, shape in shapes.items()
            if not BEGINS_ZERO.search(name)
        }
        is_difference = any(elements.place_named(words, entries) for words in _DIFFERENCES)
        if len(kinds) < _SEVERAL or is_difference:
            return
        message = f"{first.label}: all values are zero, as are those of all {len(shapes):,}"
        yield Problem(f"{message} matrices of the model", _ZERO, tensor=first.name)

    def _may_be_odd(self) -> bool:
        """Return whether a weight looks odd by itself, or begins with the bytes of another one."""
        weights = self._weights.values()
        heads = [w.head for w in weights if w.head is not None and w.first is None]
        return len(set(heads)) < len(heads) or any(weight.oddity for weight in weights)


def _are_equal(one: TensorEntry, other: TensorEntry, source: Files) -> bool:
    """Return whether two tensors have the same bits, but not in one place, as of tied layers."""
    places = [[(chunk.box, chunk.at) for chunk in entry.chunks] for entry in (one, other)]
    return places[0] != places[1] and are_equal(one, other, source)


def _weights_of(matrices: Mapping[str, DType]) -> dict[str, Weight]:
    """Return the probe of each matrix; numpy is imported only if there are any."""
    from ckptool.engine.check.weight_bits import Weight

    return {name: Weight(dtype) for name, dtype in matrices.items()}


def is_weight(entry: TensorEntry) -> bool:
    """Return whether a tensor is a model's, of floating-point numbers."""
    return entry.source_dtype.kind == "float" and state_category(entry) == "model"


def _masters_alone(catalog: Catalog) -> Iterator[Slice]:
    """Yield the masters of weights that are not stored, by the names of these."""
    for name in filter(is_master, catalog.tensors):
        parameter = parameter_of(name)
        keys = (key for key, _ in keys_of(parameter)) if parameter else ()
        if parameter and catalog.tensors.keys().isdisjoint(keys):
            yield Slice(parameter, name)


def _odd(
    names: Sequence[str], weights: ByName, exempt: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the few weights of a kind that are all zero, of one value, or nearly all denormal.

    Each comes with the code and the words of its problem.
    """
    odd: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if (oddity := weights[name].oddity) and name not in exempt:
            odd[oddity[0]][name] = oddity[1]
    for code, texts in odd.items():
        count = sum(weights[name].is_varied for name in names if name not in texts)
        if count >= 2 and 2 * count > len(names):
            for name, text in texts.items():
                yield name, code, f"{text}, but of none of {count:,}"


def _is_difference(zero: Iterable[str], elements: Elements) -> bool:
    """Return whether weights are the difference of two models, as a name or their norms say.

    Untrained weights are zero there, and norms smaller than those of any model.
    """
    located = elements.located
    if elements.place_named(_DIFFERENCE, (located[name] for name in zero)):
        return True
    entries = (entry for name, entry in located.items() if _NORM.search(name))
    norms = (entry for entry in entries if is_weight(entry) and not entry.name.endswith("bias"))
    sizes = largest_sizes(norms, elements.source)
    return bool(sizes) and max(sizes.values()) < _SMALL


def _may_be_zero(weights: ByName, trained: Collection[str]) -> set[str]:
    """Return the matrices that may be zero for a reason.

    They are the same ones in several layers; or, in a layer that was added to a model and never
    trained, all whose products are added to what goes through it, or those of its attention.
    """
    layers = layers_of(weights)
    zero = _zero_kinds(layers, weights)
    counts = Counter(kinds for layer, kinds in zero.items() if kinds != layers[layer].keys())
    explained = {layer for layer, kinds in zero.items() if counts[kinds] > 1}
    for layer, kinds in zero.items():
        outputs = {kind for kind in layers[layer] if _OUTPUT.search(kind)}
        added = {kind for kind in outputs if _ATTENTION.search(kind)}
        is_frozen = all(layers[layer][kind] not in trained for kind in kinds)
        if (len(kinds) > 1 and kinds == outputs) or (kinds <= added and is_frozen):
            explained.add(layer)
    exempt = {layers[layer][kind] for layer in explained for kind in zero[layer]}
    return exempt | _padding_experts(weights)


def _unused_halves(weights: ByName) -> set[str]:
    """Return the first halves of LoRA whose second half is zero or missing: no adapter is there."""
    halves = (match for match in map(_FIRST_HALF.search, weights) if match)
    return {half.string for half in halves if _is_zero(_second_half(half), weights)}


def _second_half(first: re.Match[str]) -> str:
    name, (start, stop) = first.string, first.span(1)
    return name[:start] + _SECOND_OF[first[1]] + name[stop:]


def _is_zero(name: str, weights: ByName) -> bool:
    return name not in weights or weights[name].first == 0


def _zero_kinds(
    layers: Mapping[_Layer, Mapping[str, str]], weights: ByName
) -> dict[_Layer, frozenset[str]]:
    """Return the kinds of each layer's matrices that are all zero."""
    return {
        layer: frozenset(kind for kind, name in names.items() if weights[name].first == 0)
        for layer, names in layers.items()
    }


def _padding_layers(stacked: ByName) -> set[str]:
    """Return the matrices of the last layers of stacks that are all zero: padding of stages."""
    layers = layers_of(stacked)
    zero = _zero_kinds(layers, stacked)
    last: list[str] = []
    for head, ordered in groupby(sorted(layers), key=itemgetter(0)):
        whole = takewhile(lambda at: zero[at] == layers[at].keys(), reversed(list(ordered)))
        last += [f"{head}{number}." for _, number in whole]
    return {name for name in stacked if last and name.startswith(tuple(last))}


def _padding_experts(weights: ByName) -> set[str]:
    """Return the experts that are zero in each of several layers: padding of ranks."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        numbers = [*_NUMBER.finditer(name)] if _COPIED in name else []
        for expert in numbers[-1:]:
            head = _NUMBER.sub("#", name[: expert.start()])
            groups[head + expert[0]].append(name)
    zero = (names for names in groups.values() if all(weights[name].first == 0 for name in names))
    return {name for names in zero if len(names) > 1 for name in names}


def _twin_layers(
    shapes: Mapping[str, Shape], weights: ByName
) -> Iterator[tuple[_Layer, _Layer, list[tuple[str, str]]]]:
    """Yield two layers that begin with the same bytes, and their pairs of matrices, if few do."""
    layers = layers_of(weights)
    heads: dict[object, list[_Layer]] = defaultdict(list)
    for layer, names in layers.items():
        looks = {(kind, shapes[n], weights[n].head) for kind, n in names.items()}
        members = [weights[name] for name in names.values()]
        if len(names) > 1 and all(w.head is not None and w.first is None for w in members):
            heads[frozenset(looks)].append(layer)
    pairs = [pair for twins in heads.values() for pair in pairwise(twins)]
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


def are_of_a_branch(missing: Collection[str], rest: Iterable[str]) -> bool:
    """Return whether a layer's missing weights are of other modules than the rest, so unused.

    One weight alone is not: what it is computed with has gradients.
    """
    lacking, having = ({_module_of(name) for name in names} for names in (missing, rest))
    return len(missing) > 1 and lacking.isdisjoint(having)


def _module_of(name: str) -> Sequence[str]:
    """Return the name that follows a layer's number."""
    return tuple(_NUMBER.split(name, maxsplit=1)[-1].split(".")[:2])
