"""Moments of layers' matrices beside those of other layers: all zero, or another's bit for bit.

Much may rightly be zero: of experts that are never chosen, of whole layers that are frozen, or not
used, as an encoder's last one, or of a branch of a layer. So of a layer in the middle less than
half is judged, and no whole modules; of any but the first a single matrix. But where layers are
stacked, as Megatron's are, moments are of no frozen ones: those have none.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import lt
from typing import TYPE_CHECKING

from msgspec import Struct

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.meaning.stacks import Slices, is_matrix
from ckptool.commands.verify.checks.meaning.weights import are_of_a_branch, layers_of
from ckptool.commands.verify.checks.measures import are_equal, largest_sizes
from ckptool.commands.verify.checks.optimizer_names import MOMENTS, StateName
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.quantization.master_names import keys_of
from ckptool.core.views import part_at
from ckptool.errors import Problem

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.moment_bits import Moment

_LAYERS = 4
"""Layers besides one that are alike by no chance, if they are not stacked."""
_FEWEST = 2
"""Layers besides one of which a single matrix is zero: what it is computed with has gradients, and
so it has, unless all that goes into it is zero, as the first layer of a decoder may begin with."""
_PAIR = 2
_LAST = re.compile(r"final_(?:layer)?norm\.weight")
"""What the output of Megatron's last layer goes through, if it is used."""
_PRUNED = "_orig"
_NARROW = "float16"
"""In it small numbers are zero, and their squares are."""

Numbers = tuple[int, ...]
Pair = tuple[str, str]
WeightOf = Callable[[str], TensorEntry | None]


class Layers(Struct, dict=True):
    """The ``moments`` that were seen whole, and their ``names`` by parameter and kind."""

    names: Mapping[str, Mapping[str, str]]
    moments: Mapping[str, Moment]
    slices: Slices
    entries: Mapping[str, TensorEntry]
    elements: Elements

    @property
    def _weights(self) -> Elements:
        return self.elements.of_model

    @cached_property
    def _models(self) -> Mapping[str, TensorEntry]:
        return models_by_tail(self._weights.located)

    def weight_of(self, moment: str) -> TensorEntry | None:
        """Return the weight of a moment, or its master where that alone is stored (ZeRO 3)."""
        parameter, index = self._place_of(moment)
        part = self._find(parameter, index)
        return part_at(*part) if part else self._weights.located.get(f"fp32.{parameter}")

    def _place_of(self, moment: str) -> tuple[str, Sequence[int]]:
        """Return the parameter of a moment, and its index if both are stacked."""
        place = self.slices[moment]
        return StateName.of(place.name if place.at else place.numbered).parameter, place.at

    def _find(
        self, parameter: str, index: Sequence[int]
    ) -> tuple[TensorEntry, Sequence[int]] | None:
        """Return the tensor that has a parameter, and its index: the weights may be stacked alone.

        So they are in Megatron's ``dp_reshardable``.
        """
        for key, at in ((parameter, index), *keys_of(parameter)):
            whole = self._models.get(key)
            if whole and len(at) <= len(whole.shape) and all(map(lt, at, whole.shape)):
                return whole, at
        return None

    def lost_moments(self) -> Iterator[Problem]:
        """Yield the moments of one layer's matrices that are zero, though the weights are not.

        Where weights are zero, too, they are padding of a stack.
        """
        zero = {
            parameter: all(self.moments[name].is_zero for name in kinds.values())
            for parameter, kinds in self.names.items()
            if kinds.keys() == MOMENTS and self.moments.keys() >= {*kinds.values()}
        }
        if not any(zero.values()):
            return
        for parameter in self._lost_matrices(zero):
            mean = self.names[parameter]["exp_avg"]
            entry, weight = self.entries[mean], self.weight_of(mean)
            if weight is None or entry.source_dtype.name == _NARROW:
                continue
            is_sound = self._weights.are_sound(weight.name)
            if is_sound and any(largest_sizes([weight], self._weights.source).values()):
                message = f"{entry.name}: all values are zero, and all squares, but of no other"
                yield Problem(f"{message} layer", "moments-zero", tensor=mean)

    def _lost_matrices(self, zero: Mapping[str, bool]) -> Iterator[str]:
        """Yield the matrices of a layer that are ``zero``, unlike those of all other layers."""
        shape_of, located = self.slices.shape, self.elements.located
        means = {parameter: self.names[parameter]["exp_avg"] for parameter in zero}
        layers = layers_of(p for p in zero if is_matrix(shape_of(means[p], located)))
        having = Counter(kind for names in layers.values() for kind in names)
        used = Counter(k for names in layers.values() for k, n in names.items() if not zero[n])
        for (head, number), names in layers.items():
            matrices = [n for k, n in names.items() if zero[n] and used[k] == having[k] - 1 > 0]
            rest = {n for n in names.values() if not zero[n]}
            if not matrices or any(self._is_masked(n) for n in names.values() if zero[n]):
                continue
            numbers = [n for layer_head, n in layers if layer_head == head]
            places = [self._find(*self._place_of(means[name])) for name in matrices]
            if all(place and place[1] for place in places):
                above = head.removesuffix("layers.")
                ends = (not zero[n] for n in zero if _LAST.fullmatch(n.removeprefix(above)))
                is_used = number < max(numbers) or len(matrices) < len(names) or any(ends)
            else:
                is_one = len(matrices) == 1 <= len(rest)
                is_few = len(matrices) < len(rest) and not are_of_a_branch(matrices, rest)
                is_inside = number < max(numbers) and len(numbers) > _LAYERS
                is_later = number > min(numbers) and len(numbers) > _FEWEST
                is_used = is_later and (is_one or (is_few and is_inside))
            yield from matrices if is_used else ()

    def _is_masked(self, parameter: str) -> bool:
        """Return whether a weight may be pruned whole, as torch's ``prune`` does by a mask."""
        weight = self.weight_of(self.names[parameter]["exp_avg"])
        mask = f"{weight.name.removesuffix(_PRUNED)}_mask" if weight else None
        return mask in self._weights.located

    def copied_moments(self) -> Iterator[Problem]:
        """Yield moments of matrices that equal another layer's, though the weights do not.

        Layers are what differs by numbers alone. Equal weights, such as those of experts copied
        from one, may have equal gradients. So have matrices whose products are added up, but then
        in all layers: copies are several matrices of a layer, or the only pair of a kind.
        """
        pairs: dict[tuple[Numbers, Numbers], list[Pair]] = defaultdict(list)
        matrices: dict[tuple[Numbers, Numbers], set[str]] = defaultdict(set)
        copies = dict.fromkeys(pair for pair in self._equal_heads() if self._are_copies(*pair))
        neighbors = (pair for pair in self._neighbors_of(copies) if self._are_copies(*pair))
        for one, other in [*copies, *neighbors]:
            (_, kind), numbers = _kind_and_layer(one)
            pairs[numbers, _kind_and_layer(other)[1]].append((one, other))
            matrices[numbers, _kind_and_layer(other)[1]].add(kind)
        pairs_of = Counter(kind for kinds in matrices.values() for kind in kinds)
        of_many = self._frequent_matrices() if pairs else set()
        for (layer, other_layer), matches in pairs.items():
            kinds = matrices[layer, other_layer]
            is_one = all(pairs_of[kind] == 1 and (kind, layer) in of_many for kind in kinds)
            for one, other in matches if len(kinds) > 1 or is_one else ():
                message = f"{self.entries[other].name}: the values of {self.entries[one].name},"
                message += " bit for bit, but the weights differ"
                yield Problem(message, "moments-copied", tensor=other)

    def _frequent_matrices(self) -> set[tuple[str, Numbers]]:
        """Return the kinds and numbers of matrices of which there are many, beside any one pair.

        There are others of the same kind, and others in the same layer.
        """
        shape_of, located = self.slices.shape, self.elements.located
        moments = ((name, next(iter(kinds.values()))) for name, kinds in self.names.items())
        matrices = [abstract(name) for name, one in moments if is_matrix(shape_of(one, located))]
        of_kind = Counter(kind for kind, _ in matrices)
        of_layer = Counter((kind.partition("#")[0], numbers) for kind, numbers in matrices)
        return {
            (kind, numbers)
            for kind, numbers in matrices
            if of_kind[kind] > _PAIR and of_layer[kind.partition("#")[0], numbers] > 1
        }

    def _equal_heads(self) -> Iterator[Pair]:
        """Yield pairs of moments that begin with the same bytes."""
        groups: dict[object, list[str]] = defaultdict(list)
        for name, moment in self.moments.items():
            if not moment.is_zero and moment.head is not None and (kind := abstract(name)[0]):
                groups[kind, moment.head].append(name)
        for names in groups.values():
            yield from pairwise(names)

    def _neighbors_of(self, copies: Collection[Pair]) -> Iterator[Pair]:
        """Yield the other moments of the layers of copies: a rank's part may begin inside one."""
        layers = {(_kind_and_layer(one)[1], _kind_and_layer(other)[1]) for one, other in copies}
        names = {_kind_and_layer(name): name for name in self.moments} if layers else {}
        for (kind, numbers), one in names.items():
            for layer, other_layer in layers:
                other = names.get((kind, other_layer)) if numbers == layer else None
                if other is not None and (one, other) not in copies:
                    yield one, other

    def _are_copies(self, one: str, other: str) -> bool:
        """Return whether moments of matrices are equal, and the weights are not."""
        moments = self.entries[one], self.entries[other]
        if not is_matrix(moments[0].shape) or not _are_alike(*moments):
            return False
        weights = [weight for weight in map(self.weight_of, (one, other)) if weight is not None]
        if len(weights) < 2 or not self._weights.are_sound(*(weight.name for weight in weights)):
            return False
        source = self._weights.source
        is_copy = are_equal(*moments, self.elements.source)
        return is_copy and not are_equal(weights[0], weights[1], source)


def _kind_and_layer(moment: str) -> tuple[tuple[str, str], Numbers]:
    """Return the kind of a moment and of its parameter, and the numbers in the parameter's name."""
    of = StateName.of(moment)
    of_parameter, numbers = abstract(of.parameter)
    return (of.kind, of_parameter), numbers


def _are_alike(one: TensorEntry, other: TensorEntry) -> bool:
    return one.shape == other.shape and one.source_dtype is other.source_dtype
