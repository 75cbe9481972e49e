"""Adam's moments that no step leaves: negative squares, zeros after steps, those of another layer.

What may be right is none: unused experts, frozen parameters, the first step of LoRA, states of
8 bits, and optimizers without such moments.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.training import models_by_tail
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.state_category import state_category
from ckptool.core.text import plural
from ckptool.engine.check.spans import Probe
from ckptool.errors import Problem

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.moment_bits import Moment

_MEAN, _SQUARE = "exp_avg", "exp_avg_sq"
_NAME = re.compile(
    r"(?P<first>exp_avg(?:_sq)?)\.(?P<of_first>.+)"
    r"|(?:.+\.)?state\.(?P<inner>exp_avg(?:_sq)?)\.(?P<of_inner>.+)"
    r"|(?:(?:.+\.)?state\.)?(?P<of_last>.+)\.(?P<last>exp_avg(?:_sq)?)"
)
"""A moment's name: by kind (DeepSpeed, Megatron), or by parameter (torch)."""
_TYPES = ("float32", "bfloat16", "float16")
_WHOLE = ("float32",)
"""Types in which a square is no zero only because it is small."""
_VISIBLE = 1e-12
"""A mean whose square is no zero in 32 bits, whatever the optimizer's second decay."""
_MADE_UP = 0.25
"""Of all means of squares, the share of values below zero that no fault leaves."""
_STEPS = 2
"""Counted steps after which something has moments: one step without gradients may be that which
makes the state (DeepSpeed, torch's ``get_optimizer_state_dict``)."""
_UNCOUNTED = 1 << 53
"""More steps than anything counts one by one in a float."""

_OF_GROUP = re.compile(r".*\bparam_groups\.\d+\.step")
_OF_EXPERTS = re.compile("expert|moe")
_SEVERAL = 3
"""Kinds of layers that a rank has parts of which cannot all be unused."""


class Moments:
    """The moments of a checkpoint's parameters, by the parameter and their kind."""

    def __init__(self, catalog: Catalog) -> None:
        self._names: dict[str, dict[str, str]] = defaultdict(dict)
        self._found: dict[str, Moment] = {}
        self._steps = _steps_taken(catalog)
        for name, entry in catalog.tensors.items():
            kind, parameter = parse_moment(name) or ("", "")
            is_moment = kind and entry.source_dtype.name in _TYPES and entry.elements
            if is_moment and state_category(entry) == "optimizer":
                from ckptool.commands.verify.checks.meaning.moment_bits import Moment

                self._names[parameter][kind] = name
                self._found[name] = Moment(is_square=kind == _SQUARE)

    @property
    def probes(self) -> Mapping[str, Probe]:
        """What looks at each of the moments."""
        return self._found

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the moments that no step leaves."""
        located = elements.located
        seen = {
            name: moment
            for name, moment in self._found.items()
            if elements.are_sound(name) and moment.elements == located[name].elements
        }
        yield from _negative(seen, located)
        if seen and all(moment.is_zero for moment in seen.values()):
            yield from self._all_zero(elements, len(seen)) if elements.is_all else ()
            return
        yield from self._squares_lost(seen, elements)
        yield from self._cut(seen, elements)
        yield from _lost_ranks(seen, located) if elements.is_all else ()
        yield from _copied(seen, elements)

    def _all_zero(self, elements: Elements, count: int) -> Iterator[Problem]:
        least = elements.content.counters.least
        steps = self._steps if least is None else least
        if count > 1 and steps is not None and _STEPS <= steps < _UNCOUNTED:
            first = next(iter(self._found))
            message = f"{first}: all moments of all parameters are zero, but {steps:g} steps are"
            yield Problem(f"{message} counted", "moments-zero", tensor=first)

    def _squares_lost(self, seen: Mapping[str, Moment], elements: Elements) -> Iterator[Problem]:
        """Yield squares that are all zero where the mean is large enough not to be."""
        lost = {
            kinds[_MEAN]: kinds[_SQUARE]
            for kinds in self._names.values()
            if kinds.keys() == {_MEAN, _SQUARE} and kinds[_MEAN] in seen and kinds[_SQUARE] in seen
            if seen[kinds[_SQUARE]].is_zero and not seen[kinds[_MEAN]].is_zero
            if elements.located[kinds[_SQUARE]].source_dtype.name in _WHOLE
        }
        if not lost:
            return
        from ckptool.commands.verify.checks.meaning.moment_bits import largest_sizes

        sizes = largest_sizes([elements.located[name] for name in lost], elements.source)
        for mean, square in lost.items():
            if sizes.get(mean, 0.0) >= _VISIBLE:
                message = f"{square}: all values are zero, but {mean} is up to {sizes[mean]:g}"
                yield Problem(message, "moments-zero", tensor=square)

    def _cut(self, seen: Mapping[str, Moment], elements: Elements) -> Iterator[Problem]:
        """Yield ranges of zeros that end at the border of a rank's part, in all of a parameter's.

        In one alone a mean may be zero, which forgets, or a square too small for its type.
        """
        located, source = elements.located, elements.source
        ending = {
            parameter: kinds
            for parameter, kinds in self._names.items()
            if all(name in seen and seen[name].runs for name in kinds.values())
        }
        weights = models_by_tail(located) if ending else {}
        for parameter, kinds in ending.items():
            from ckptool.commands.verify.checks.meaning.moment_bits import cut_ranges

            weight = _weight_of(parameter, weights, located)
            found = [
                {*cut_ranges(located[name], seen[name], weight, source)} for name in kinds.values()
            ]
            for each in sorted(set.intersection(*found)):
                first = located[next(iter(kinds.values()))]
                yield Problem(each.describe(first), "moments-zero", tensor=first.name)


def _lost_ranks(
    seen: Mapping[str, Moment], located: Mapping[str, TensorEntry]
) -> Iterator[Problem]:
    """Yield the ranks of which all moments are zero, of several kinds of layers that others use.

    A rank may well have nothing but rows that were never seen, experts that are never chosen, or
    layers of a kind that is not used, such as those of images while there are none.
    """
    zero: dict[int, list[str]] = defaultdict(list)
    for name, moment in seen.items():
        for chunk in located[name].chunks if moment.zeros else ():
            if chunk.rank is not None and moment.zeros[chunk.box] == chunk.box.volume:
                zero[chunk.rank].append(name)
    for name, moment in seen.items() if zero else ():
        for chunk in located[name].chunks:
            if chunk.box.volume and moment.zeros[chunk.box] < chunk.box.volume:
                zero.pop(chunk.rank or 0, None)
        if not zero:
            return
    used = {_kind_of(n, located[n]) for n in seen if zero and not seen[n].is_zero}
    for rank, names in zero.items():
        kinds = {_kind_of(n, located[n]) for n in names if not _OF_EXPERTS.search(n)}
        if len(kinds & used) >= _SEVERAL:
            message = f"{names[0]}: all moments of rank {rank} are zero, of"
            message += f" {plural(len(names), 'tensor')}, those of other ranks are not"
            yield Problem(message, "moments-zero", tensor=names[0])


def _kind_of(name: str, entry: TensorEntry) -> str:
    """Return the kind of layer that a moment is of: by its shape where parameters have numbers."""
    parameter = _parameter_of(name)
    return str(entry.shape) if parameter.isdigit() else abstract(parameter)[0]


def _steps_taken(catalog: Catalog) -> float | None:
    """Return the steps that an optimizer took, as far as values count them.

    DeepSpeed counts those that its loss scale skips, Megatron-core's optimizers have one count for
    all parameters of a group.
    """
    entries = (catalog.objects.get(name) for name in ("global_steps", "skipped_steps"))
    taken, skipped = (entry.value if entry else None for entry in entries)
    if isinstance(taken, int) and isinstance(skipped, int):
        return taken - skipped
    groups = (e.value for name, e in catalog.objects.items() if _OF_GROUP.fullmatch(name))
    return max((count for count in groups if type(count) in (int, float)), default=None)


def parse_moment(name: str) -> tuple[str, str] | None:
    """Return the kind of a moment and the parameter that it is of; None if it is no moment."""
    found = _NAME.fullmatch(name) if _MEAN in name else None
    if found is None:
        return None
    kind = found["first"] or found["inner"] or found["last"]
    return kind, found["of_first"] or found["of_inner"] or found["of_last"]


def _negative(seen: Mapping[str, Moment], located: Mapping[str, TensorEntry]) -> Iterator[Problem]:
    """Yield means of squares with values below zero, unless that many are in all of them.

    Then they are none of an optimizer at all, such as a test's random numbers.
    """
    squares = {name: moment for name, moment in seen.items() if moment.is_square}
    total = sum(moment.elements for moment in squares.values())
    if sum(moment.negative for moment in squares.values()) > _MADE_UP * total:
        return
    for name, moment in squares.items():
        if moment.negative and moment.first is not None:
            message = (
                f"{name}: {moment.negative:,} of {located[name].elements:,} values are negative"
            )
            message += f", first at {list(moment.first)}: means of squares cannot be"
            yield Problem(message, "moments-negative", tensor=name)


def _copied(seen: Mapping[str, Moment], elements: Elements) -> Iterator[Problem]:
    """Yield moments of matrices that are those of another layer, whose weights are others.

    Layers are what differs by numbers alone. Equal weights, such as those of experts copied from
    one, may have equal gradients, and so have matrices whose products are added up: only where
    several matrices of a layer are another's are they copies.
    """
    pairs: dict[object, list[tuple[str, str]]] = defaultdict(list)
    matrices: dict[object, set[str]] = defaultdict(set)
    for one, other in _alike(seen, elements):
        (kind, numbers), (_, others) = (abstract(_parameter_of(name)) for name in (one, other))
        pairs[numbers, others].append((one, other))
        matrices[numbers, others].add(kind)
    for layers, found in pairs.items():
        for one, other in found if len(matrices[layers]) > 1 else ():
            message = f"{other}: the values of {one}, bit for bit, but the weights differ"
            yield Problem(message, "moments-copied", tensor=other)


def _alike(seen: Mapping[str, Moment], elements: Elements) -> Iterator[tuple[str, str]]:
    """Yield the names of moments that are equal, of weights that are not."""
    located, source = elements.located, elements.source
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, moment in seen.items():
        entry, kind = located[name], abstract(name)[0]
        if not moment.is_zero and moment.head is not None and _is_matrix(entry) and kind:
            groups[kind, entry.shape, entry.source_dtype.name, moment.head].append(name)
    several = [names for names in groups.values() if len(names) > 1]
    models = models_by_tail(located) if several else {}
    for one, other in (pair for names in several for pair in pairwise(names)):
        from ckptool.commands.verify.checks.meaning.moment_bits import are_equal

        parameters = _parameter_of(one), _parameter_of(other)
        weights = [_weight_of(each, models, located) for each in parameters]
        known = [weight for weight in weights if weight and elements.are_sound(weight.name)]
        if len(known) < 2 or not are_equal(located[one], located[other], source):
            continue
        if not are_equal(known[0], known[1], source):
            yield one, other


def _parameter_of(name: str) -> str:
    found = parse_moment(name)
    return found[1] if found else name


def _weight_of(
    parameter: str, models: Mapping[str, TensorEntry], located: Mapping[str, TensorEntry]
) -> TensorEntry | None:
    """Return the weight of a parameter, or its master where that alone is stored (ZeRO 3)."""
    return models.get(parameter) or located.get(f"fp32.{parameter}")


def _is_matrix(entry: TensorEntry) -> bool:
    return sum(size > 1 for size in entry.shape) > 1
