"""Adam's moments that no step leaves: negative squares, zeros after steps, those of another layer.

Moments that may be right are no problem: of unused experts, frozen parameters, the first step of
LoRA, states of 8 bits, and optimizers without such moments.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckptool.commands.verify.checks.elements import Elements
from ckptool.commands.verify.checks.meaning.counts import UNCOUNTED
from ckptool.commands.verify.checks.meaning.moments_of_layers import Layers, WeightOf
from ckptool.commands.verify.checks.meaning.numbered import states_by_name
from ckptool.commands.verify.checks.meaning.stacks import Entries, Slices
from ckptool.commands.verify.checks.meaning.weights import SECOND_HALF, is_weight
from ckptool.commands.verify.checks.measures import largest_sizes
from ckptool.commands.verify.checks.optimizer_names import RATE, StateName, moments_in
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.state_category import state_category
from ckptool.core.text import list_some, plural
from ckptool.engine.check.spans import Probe
from ckptool.errors import Problem
from ckptool.storage.files import Files

if TYPE_CHECKING:
    from ckptool.commands.verify.checks.meaning.moment_bits import Moment

_MEAN, _SQUARE = "exp_avg", "exp_avg_sq"
_WIDE = ("float64", "float32", "bfloat16")
"""Types in which a mean is no zero only because it is small, until steps made it so."""
_TYPES = (*_WIDE, "float16")
_WHOLE = ("float64", "float32")
"""Types in which a square is no zero only because it is small."""
_VISIBLE = 1e-12
"""A mean whose square is no zero in 32 bits, whatever the optimizer's second decay, and a square of
gradients that is not what an optimizer adds to it."""
_MADE_UP = 0.25
"""Of all means of squares, the share of values below zero that no fault leaves."""
_STEPS = 2
"""Counted steps after which something has moments: one step without gradients may be that which
makes the state (DeepSpeed, torch's ``get_optimizer_state_dict``), or what follows began as zeros.
"""

_FORGOTTEN = 1e-20
"""What is left, after all steps, of a mean that may be zero: less than that of the smallest
gradient whose square is no zero in 32 bits, 1e-22, over the smallest number, 1e-45."""
_BETAS = ".betas"
_GROUPS, _KEPT = "param_groups.", ".keep_num"
"""Where AdaShift says how many gradients it keeps before there are squares of them
(pytorch_optimizer 3.5)."""
_OF_GROUP = re.compile(r".*\bparam_groups\.\d+\.step")
_OF_EXPERTS = re.compile("expert|moe")
_SEVERAL = 3
"""Kinds of layers that a rank has parts of which cannot all be unused."""

ByName = Mapping[str, "Moment"]
Located = Mapping[str, TensorEntry]


class Moments:
    """The moments of a checkpoint's parameters, by the parameter and their kind.

    Those of stacked layers and experts have the names that they would have alone, and those of
    numbered parameters the names of the ``model``'s, which may be in another checkpoint.
    """

    def __init__(self, catalog: Catalog, model: Elements | None) -> None:
        self._names: dict[str, dict[str, str]] = defaultdict(dict)
        self._moments: dict[str, Moment] = {}
        self._catalog = catalog
        moments = {n: e for n, e in catalog.tensors.items() if _is_moment(n, e)}
        models = catalog.tensors if model is None else model.located
        self._slices = Slices(moments, states_by_name(moments, models))
        for name, of in moments_in(self._slices.names):
            from ckptool.commands.verify.checks.meaning.moment_bits import Moment

            self._names[of.parameter][of.kind] = name
            self._moments[name] = Moment(is_square=of.kind == _SQUARE)

    @property
    def probes(self) -> Mapping[str, Probe]:
        """What looks at each of the moments."""
        return self._slices.probes(self._moments)

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the moments that no step leaves."""
        for problem in self._problems(elements):
            name = problem.tensor
            yield problem.of_tensor(self._slices.tensor(name)) if name else problem

    def _problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the problems of moments, by the names that they would have alone."""
        names = self._slices.seen_whole(self._moments, elements)
        moments = {name: self._moments[name] for name in names}
        if not moments:
            return
        entries = Entries(self._slices, elements.located)
        yield from _negative_squares(moments, entries)
        if all(moment.is_zero for moment in moments.values()):
            yield from self._all_zero(elements, len(moments)) if elements.is_all else ()
            return
        layers = Layers(self._names, moments, self._slices, entries, elements)
        yield from self._lost_squares(moments, entries, elements)
        yield from self._lost_means(moments, entries, elements)
        yield from self._check_cuts(moments, entries, layers.weight_of, elements.source)
        yield from _lost_ranks(moments, entries) if elements.is_all else ()
        steps = self._steps_taken(elements)
        yield from layers.lost_moments() if steps is None or steps >= _STEPS else ()
        yield from layers.copied_moments()
        if elements.is_all and steps is not None and steps >= _STEPS:
            yield from self._lost_halves(moments, entries, elements.of_model)

    def _all_zero(self, elements: Elements, count: int) -> Iterator[Problem]:
        steps = self._steps_taken(elements)
        is_counted = count > 1 and steps is not None and _STEPS <= steps < UNCOUNTED
        if is_counted and not self._begins_later(steps):
            first = next(iter(self._moments))
            message = f"{self._slices[first].label}: all moments of all parameters are zero, but"
            yield Problem(f"{message} {steps:g} steps are counted", "moments-zero", tensor=first)

    def _steps_taken(self, elements: Elements) -> float | None:
        counts = elements.content.counters.taken
        return max(counts.values()) if counts else _steps_of_values(self._catalog)

    def _begins_later(self, steps: float | None) -> bool:
        """Return whether an optimizer keeps the gradients of at least as many steps."""
        objects = self._catalog.objects.items()
        counts = (e.value for name, e in objects if name.endswith(_KEPT) and _GROUPS in name)
        return steps is not None and any(type(n) is int and n >= steps for n in counts)

    def _lost_squares(
        self, moments: ByName, entries: Located, elements: Elements
    ) -> Iterator[Problem]:
        """Yield squares that are all zero where the mean is large enough not to be."""
        squares = {
            mean: square
            for mean, square in self._pairs(moments)
            if moments[square].is_zero and not moments[mean].is_zero
            if entries[square].source_dtype.name in _WHOLE
        }
        if not squares:
            return
        is_empty = all(moment.is_zero for moment in moments.values() if moment.is_square)
        if is_empty and self._begins_later(self._steps_taken(elements)):
            return
        sizes = largest_sizes([entries[name] for name in squares], elements.source)
        for mean, square in squares.items():
            size = sizes.get(entries[mean].name, 0.0)
            if size >= _VISIBLE:
                message = f"{entries[square].name}: all values are zero, but {entries[mean].name}"
                yield Problem(f"{message} is up to {size:g}", "moments-zero", tensor=square)

    def _lost_means(
        self, moments: ByName, entries: Located, elements: Elements
    ) -> Iterator[Problem]:
        """Yield means that are all zero, though they had too few steps to forget what they were.

        The mean of squares shows that there were gradients.
        """
        steps, objects = self._steps_taken(elements), self._catalog.objects.items()
        betas = [e.value for name, e in objects if _GROUPS in name and name.endswith(_BETAS)]
        decays = [value[0] for value in betas if isinstance(value, list | tuple) and value]
        is_known = all(isinstance(decay, float) for decay in decays) and len(decays) == len(betas)
        if not decays or not is_known or steps is None or not _STEPS < steps < UNCOUNTED:
            return
        if min(decays) ** steps < _FORGOTTEN:
            return
        squares = {
            square: mean
            for mean, square in self._pairs(moments)
            if moments[mean].is_zero and not moments[square].is_zero
            if entries[mean].source_dtype.name in _WIDE
        }
        sizes = largest_sizes([entries[name] for name in squares], elements.source)
        for square, mean in squares.items():
            size = sizes.get(entries[square].name, 0.0)
            if size >= _VISIBLE:  # Adafactor and CAME add 1e-30 and more to squares of zeros
                message = f"{entries[mean].name}: all values are zero, but {entries[square].name}"
                message += f" is up to {size:g} after {steps:g} steps"
                yield Problem(message, "moments-zero", tensor=mean)

    def _pairs(self, moments: ByName) -> Iterator[tuple[str, str]]:
        """Yield the names of mean and square of each parameter that has both, and nothing else."""
        for names in self._names.values():
            if names.keys() == {_MEAN, _SQUARE} and moments.keys() >= {*names.values()}:
                yield names[_MEAN], names[_SQUARE]

    def _lost_halves(self, moments: ByName, entries: Located, model: Elements) -> Iterator[Problem]:
        """Yield halves of LoRA that are zero, as before the first step, but have had gradients.

        Parameters may have numbers, so those of one shape are counted. No group may be frozen.
        """
        rates = [e.value for name, e in self._catalog.objects.items() if RATE.fullmatch(name)]
        moved: Counter[tuple[int, ...]] = Counter()
        for name, moment in moments.items():
            if StateName.of(name).kind == _MEAN and not moment.is_zero:
                moved[entries[name].shape] += 1
        weights = [e for e in model.located.values() if moved[e.shape] and is_weight(e)]
        shapes = {e.shape for e in weights if SECOND_HALF.search(e.name)}
        if not shapes or (0 in rates and any(rate != 0 for rate in rates)):
            return
        candidates = [e for e in weights if e.shape in shapes and model.are_sound(e.name)]
        sizes = largest_sizes(candidates, model.source)
        for shape in shapes:
            count = sum(e.shape == shape for e in weights)
            zeros = [n for n, size in sizes.items() if not size and model.located[n].shape == shape]
            zeros = [n for n in zeros if SECOND_HALF.search(n)]
            if zeros and count - len(zeros) < moved[shape] <= count > 2 * len(zeros):
                message = f"{list_some(zeros, 2)}: all values are zero, but {moved[shape]:,} of"
                message += f" {count:,} tensors of this shape have had gradients"
                yield Problem(message, "weight-zero")

    def _check_cuts(
        self, moments: ByName, entries: Located, weight_of: WeightOf, source: Files
    ) -> Iterator[Problem]:
        """Yield ranges of zeros that end at the border of a rank's part, in all its moments.

        In one moment alone, a mean that forgets may be zero, or a square too small for its type,
        but neither in a part of a row and in all that follows it.
        """
        for kinds in self._names.values():
            if not all(name in moments and not moments[name].is_zero for name in kinds.values()):
                continue
            if not any(moments[name].runs for name in kinds.values()):
                continue
            from ckptool.commands.verify.checks.meaning.moment_bits import cut_ranges

            weight = weight_of(next(iter(kinds.values())))
            cuts = {
                name: {*cut_ranges(entries[name], moments[name], weight, source)}
                for name in kinds.values()
            }
            for zeros in sorted(set.union(*cuts.values())):
                having = [name for name, ranges in cuts.items() if zeros in ranges]
                types = {entries[name].source_dtype.name for name in having}
                is_alone = types <= {*_WHOLE} and zeros.is_of_rows(entries[having[0]].shape)
                if having == [*cuts] or is_alone:
                    message = zeros.describe(entries[having[0]])
                    yield Problem(message, "moments-zero", tensor=having[0])


def _lost_ranks(moments: ByName, located: Located) -> Iterator[Problem]:
    """Yield the ranks of which all moments are zero, of several kinds of layers that others use.

    A rank may well have nothing but rows that were never seen, experts that are never chosen, or
    layers of a kind that is not used, such as those of images while there are none. In an unused
    layer, other ranks' parts of its tensors are zero, too.
    """
    zero: dict[int, list[str]] = defaultdict(list)
    for name, moment in moments.items():
        for chunk in located[name].chunks if moment.zeros else ():
            if chunk.rank is not None and moment.zeros[chunk.box] == chunk.box.volume:
                zero[chunk.rank].append(name)
    for name, moment in moments.items() if zero else ():
        for chunk in located[name].chunks:
            if chunk.box.volume and moment.zeros[chunk.box] < chunk.box.volume:
                zero.pop(chunk.rank or 0, None)
        if not zero:
            return
    used = {_kind_of(n, located[n]) for n in moments if zero and not moments[n].is_zero}
    for rank, names in zero.items():
        kinds = {_kind_of(n, located[n]) for n in names if not _OF_EXPERTS.search(n)}
        chunks = {n: [c for c in located[n].chunks if c.box.volume] for n in names}
        cut = [n for n in names if any(chunk.rank != rank for chunk in chunks[n])]
        is_lost = not cut or any(not moments[name].is_zero for name in cut)
        if is_lost and len(kinds & used) >= _SEVERAL:
            message = f"{located[names[0]].name}: all moments of rank {rank} are zero, of"
            message += f" {plural(len(names), 'tensor')}, those of other ranks are not"
            yield Problem(message, "moments-zero", tensor=names[0])


def _kind_of(name: str, entry: TensorEntry) -> str:
    """Return the kind of layer that a moment is of: by its shape where parameters have numbers."""
    parameter = StateName.of(name).parameter
    return str(entry.shape) if parameter.isdigit() else abstract(parameter)[0]


def _steps_of_values(catalog: Catalog) -> float | None:
    """Return the steps that an optimizer took, as far as values count them.

    DeepSpeed counts those that its loss scale skips, Megatron-core's optimizers have one count for
    all parameters of a group.
    """
    entries = (catalog.objects.get(name) for name in ("global_steps", "skipped_steps"))
    steps, skipped = (entry.value if entry else None for entry in entries)
    if isinstance(steps, int) and isinstance(skipped, int):
        return steps - skipped
    groups = [e.value for name, e in catalog.objects.items() if _OF_GROUP.fullmatch(name)]
    groups += (group.get("step") for e in catalog.objects.values() for group in _groups_in(e.value))
    return max((count for count in groups if type(count) in (int, float)), default=None)


def _groups_in(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the groups of an optimizer that is one value, as in Megatron's ``dp_reshardable``."""
    groups = value.get("param_groups") if isinstance(value, dict) else None
    if isinstance(groups, list):
        yield from (group for group in groups if isinstance(group, dict))


def _negative_squares(moments: ByName, located: Located) -> Iterator[Problem]:
    """Yield means of squares with values below zero, unless many of all their values are.

    Then no optimizer made them, such as a test's random numbers.
    """
    squares = {name: moment for name, moment in moments.items() if moment.is_square}
    total = sum(moment.elements for moment in squares.values())
    if sum(moment.negative for moment in squares.values()) > _MADE_UP * total:
        return
    for name, moment in squares.items():
        if moment.negative and moment.first is not None:
            entry = located[name]
            message = f"{entry.name}: {moment.negative:,} of {entry.elements:,} values are negative"
            message += f", first at {list(moment.first)}: means of squares cannot be"
            yield Problem(message, "moments-negative", tensor=name)


def _is_moment(name: str, entry: TensorEntry) -> bool:
    """Return whether a tensor is a moment whose name can be parsed."""
    is_state = _MEAN in name and state_category(entry) == "optimizer"
    return is_state and entry.source_dtype.name in _TYPES and entry.elements > 0
