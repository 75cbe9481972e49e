"""Moments of layers' matrices beside those of other layers: all zero, or another's bit for bit.

Much may rightly be zero: of experts that are never chosen, of whole layers that are frozen, or not
used, as an encoder's last one, or of a branch of a layer. So of a layer in the middle less than
half is judged, and no whole modules. But where layers are stacked, as Megatron's are, nothing is
frozen: it has no moments of what is.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import lt
from typing import TYPE_CHECKING

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.meaning.stacks import Slices
from ckptool.commands.verify.checks.meaning.weights import are_of_a_branch, is_matrix, layers_of
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.quantization.master_names import keys_of, parameter_of_moment
from ckptool.core.views import part_at
from ckptool.errors import Problem

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.moment_bits import Moment

_BOTH = {"exp_avg", "exp_avg_sq"}
_LAYERS = 4
"""Layers besides one that are alike by no chance, if they are not stacked."""
_LAST = re.compile(r"final_(?:layer)?norm\.weight")
"""What the output of Megatron's last layer goes through, if it is used."""
_NARROW = "float16"
"""In it small numbers are zero, and their squares are."""

WeightOf = Callable[[str], TensorEntry | None]


class Layers:
    """The moments that were ``seen``, by ``names``: of each parameter by their kinds."""

    def __init__(
        self,
        names: Mapping[str, Mapping[str, str]],
        seen: Mapping[str, Moment],
        slices: Slices,
        entries: Mapping[str, TensorEntry],
        elements: Elements,
    ) -> None:
        self._names, self._seen, self._slices = names, seen, slices
        self._entries, self._elements = entries, elements

    @cached_property
    def _models(self) -> Mapping[str, TensorEntry]:
        return models_by_tail(self._elements.located)

    def weight_of(self, moment: str) -> TensorEntry | None:
        """Return the weight of a moment, or its master where that alone is stored (ZeRO 3)."""
        parameter, index = self._place_of(moment)
        found = self._find(parameter, index)
        return part_at(*found) if found else self._elements.located.get(f"fp32.{parameter}")

    def _place_of(self, moment: str) -> tuple[str, Sequence[int]]:
        """Return the parameter of a moment, and its index if both are stacked."""
        each = self._slices[moment]
        return parameter_of_moment(each.name), each.at

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

    def lost(self) -> Iterator[Problem]:
        """Yield the moments of one layer's matrices that are zero, though the weights are not.

        Weights that are fill a stack up.
        """
        zero = {
            parameter: all(self._seen[name].is_zero for name in kinds.values())
            for parameter, kinds in self._names.items()
            if kinds.keys() == _BOTH and self._seen.keys() >= {*kinds.values()}
        }
        if not any(zero.values()):
            return
        from ckptool.commands.verify.checks.meaning.moment_bits import largest_sizes

        for parameter in self._lost(zero):
            mean = self._names[parameter]["exp_avg"]
            entry, weight = self._entries[mean], self.weight_of(mean)
            if weight is None or entry.source_dtype.name == _NARROW:
                continue
            is_sound = self._elements.are_sound(weight.name)
            if is_sound and any(largest_sizes([weight], self._elements.source).values()):
                message = f"{entry.name}: all values are zero, and all squares, but of no other"
                yield Problem(f"{message} layer", "moments-zero", tensor=mean)

    def _lost(self, zero: Mapping[str, bool]) -> Iterator[str]:
        """Yield the matrices of one layer that are ``zero``, those of all others are not."""
        shape_of, located = self._slices.shape, self._elements.located
        means = {parameter: self._names[parameter]["exp_avg"] for parameter in zero}
        layers = layers_of(p for p in zero if is_matrix(shape_of(means[p], located)))
        having = Counter(kind for names in layers.values() for kind in names)
        used = Counter(k for names in layers.values() for k, n in names.items() if not zero[n])
        for (head, number), names in layers.items():
            lost = [n for k, n in names.items() if zero[n] and used[k] == having[k] - 1 > 0]
            if not lost:
                continue
            numbers = [other for before, other in layers if before == head]
            found = [self._find(*self._place_of(means[name])) for name in lost]
            if all(each and each[1] for each in found):
                above = head.removesuffix("layers.")
                ends = (not zero[n] for n in zero if _LAST.fullmatch(n.removeprefix(above)))
                is_used = number < max(numbers) or len(lost) < len(names) or any(ends)
            else:
                is_inside = len(numbers) > _LAYERS and min(numbers) < number < max(numbers)
                others = {*names.values()}.difference(lost)
                is_few = len(lost) < len(others) and not are_of_a_branch(lost, others)
                is_used = is_inside and is_few
            yield from lost if is_used else ()

    def copied(self) -> Iterator[Problem]:
        """Yield moments of matrices that are those of another layer, whose weights are others.

        Layers are what differs by numbers alone. Equal weights, such as those of experts copied
        from one, may have equal gradients, and so have matrices whose products are added up: only
        where several matrices of a layer are another's are they copies.
        """
        pairs: dict[object, list[tuple[str, str]]] = defaultdict(list)
        matrices: dict[object, set[str]] = defaultdict(set)
        for one, other in self._alike():
            (kind, numbers), (_, others) = (
                abstract(parameter_of_moment(name)) for name in (one, other)
            )
            pairs[numbers, others].append((one, other))
            matrices[numbers, others].add(kind)
        for layers, found in pairs.items():
            for one, other in found if len(matrices[layers]) > 1 else ():
                message = f"{self._entries[other].name}: the values of {self._entries[one].name},"
                message += " bit for bit, but the weights differ"
                yield Problem(message, "moments-copied", tensor=other)

    def _alike(self) -> Iterator[tuple[str, str]]:
        """Yield the names of moments that are equal, of weights that are not."""
        source = self._elements.source
        groups: dict[object, list[str]] = defaultdict(list)
        for name, moment in self._seen.items():
            if not moment.is_zero and moment.head is not None and (kind := abstract(name)[0]):
                groups[kind, moment.head].append(name)
        for one, other in (pair for names in groups.values() for pair in pairwise(names)):
            from ckptool.commands.verify.checks.meaning.moment_bits import are_equal

            both = self._entries[one], self._entries[other]
            if not is_matrix(both[0].shape) or not _are_alike(*both):
                continue
            known = [each for each in map(self.weight_of, (one, other)) if each is not None]
            if len(known) < 2 or not self._elements.are_sound(*(each.name for each in known)):
                continue
            if are_equal(*both, source) and not are_equal(known[0], known[1], source):
                yield one, other


def _are_alike(one: TensorEntry, other: TensorEntry) -> bool:
    return one.shape == other.shape and one.source_dtype is other.source_dtype
