"""The consistency of a training run's state: optimizer state and step counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import isnan

from ckptool.commands.open import Survey
from ckptool.commands.verify.checks.begun_later import code_of_fewer
from ckptool.commands.verify.checks.content import locate_whole
from ckptool.commands.verify.checks.measures import measure_each
from ckptool.commands.verify.checks.optimizer_names import RATE, StateName, groups_of
from ckptool.core.catalog import Catalog, Container, Place, RankStep, TensorEntry
from ckptool.core.state_category import is_of_data, state_category
from ckptool.core.text import list_some
from ckptool.engine.read.tensors import (
    TensorReader,
    TensorSource,
    TensorTile,
    place_job,
)
from ckptool.engine.read.tiles import Job, read_tiles
from ckptool.errors import CkptoolError, Problem
from ckptool.storage.files import Files

_KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step")
_OPTIONS = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum"}
"""The options of a group of parameters without which torch's optimizers keep no such state."""
_WEIGHTS = frozenset(["module", "model", "fp32"])
_KINDS_FIRST = frozenset([*_KINDS, *_WEIGHTS])
_STEPS = ("step", "global_step", "iteration", "current_step", "epoch", "last_epoch")
_COUNTER, _OF_BUFFERS = ".step", "step."
_SHOWN = 3
_EXPERT = "expert"
_FEW_VALUES = 8
"""Two saves, or parameters added later, give few values; more are not counters of a run."""


def optimizer_problems(catalog: Catalog) -> Iterator[Problem]:
    """Yield optimizer state that lacks a kind that other parameters have, and rates of NaN."""
    objects = catalog.objects.items()
    rates = (n for n, e in objects if type(e.value) is float and isnan(e.value))
    for name in filter(RATE.fullmatch, rates):
        message = f"{name}: the learning rate is NaN, and so are all weights after the next step"
        yield Problem(message, "not-finite").with_counts(nan=1)
    kinds: dict[str, set[str]] = defaultdict(set)
    by_first: dict[str, set[str]] = defaultdict(set)
    for name, entry in catalog.tensors.items():
        first, _, rest = name.partition(".")
        if first in _KINDS_FIRST:  # as DeepSpeed and Megatron name state, and the weights with it
            by_first[rest].add(first)
        head, _, last = name.rpartition(".")
        if last in _KINDS and head and state_category(entry) == "optimizer":
            kinds[head].add(last)
        whole, _, kind = head.rpartition(".")
        if kind in _KINDS and whole and state_category(entry) == "optimizer":
            kinds[whole].add(kind)  # in 8 bits: exp_avg.codes and exp_avg.scale
    # a buffer, or a frozen or tied parameter, has no state at all
    first_kinds = {name: firsts for name, firsts in by_first.items() if firsts - _WEIGHTS}
    for states in filter(None, (kinds, first_kinds)):
        yield from _incomplete_states(states, catalog)


def _incomplete_states(states: Mapping[str, set[str]], catalog: Catalog) -> Iterator[Problem]:
    """Yield incomplete state, compared with other parameters'; state in conflict counts as there.

    Other state may be in its place: squares of rows and columns (Adafactor, CAME), a step that is
    no tensor, all of another optimizer's. An option may leave kinds out in groups of parameters.
    """
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for head, state in states.items():
        conflicts = {kind for kind in _KINDS if f"{head}.{kind}" in catalog.conflicts}
        groups[frozenset(state) | conflicts].append(head)
    for kinds, heads in groups.items():
        larger = [other for other in groups if kinds < other]
        if larger:
            most = max(larger, key=lambda other: len(groups[other]))
            extras, left_out = _other_state(catalog), _optional_kinds(catalog)
            reference = extras[groups[most][0]]
            lacking = [head for head in heads if extras[head] <= reference]
            lacking = [head for head in lacking if not most - kinds <= left_out[head]]
            what = ", ".join(sorted(most - kinds))
            for head in lacking[:1]:
                message = f"{list_some(lacking, 1)}: without {what}, which"
                message += f" {len(groups[most]):,} other parameters have"
                yield Problem(message, "optimizer-incomplete", tensor=head)


def _optional_kinds(catalog: Catalog) -> dict[str, set[str]]:
    """Return the kinds of state that options leave out, by parameter."""
    left_out: dict[str, set[str]] = defaultdict(set)
    for group in groups_of(catalog):
        options = {k: catalog.objects.get(f"{group.head}.{n}") for k, n in _OPTIONS.items()}
        kinds = {kind for kind, option in options.items() if option and not option.value}
        for parameter in group.parameters if kinds else ():
            left_out[group.state_of(parameter)] |= kinds
    return left_out


def _other_state(catalog: Catalog) -> dict[str, set[str]]:
    """Return the other state of each parameter: other kinds of tensors, and values."""
    extras: dict[str, set[str]] = defaultdict(set)
    for name in catalog.tensors:
        head, _, last = name.rpartition(".")
        if last not in _KINDS:
            extras[head].add(last)
    for name in catalog.objects:
        head, _, last = name.rpartition(".")
        extras[head].add(last)
    return extras


def models_by_tail(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the model's tensors by name, and by name without the first step."""
    models: dict[str, TensorEntry] = {}
    for entry in tensors.values():
        if state_category(entry) == "model":
            models[entry.name] = entry
            models.setdefault(entry.name.partition(".")[2], entry)
    return models


def differing_step_values(catalog: Catalog) -> Iterator[Problem]:
    """Yield differing step counters of ranks (``NAME@rankR``), other than places in the data."""
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in catalog.objects.values():
        last = entry.path[-1] if entry.path else None
        is_number = isinstance(entry.value, int | float) and not isinstance(entry.value, bool)
        if not is_number or is_of_data(entry.path):
            continue
        if isinstance(last, RankStep) and str(last.step) in _STEPS:
            groups[entry.name.rpartition("@rank")[0]].append(f"{entry.value} on rank {last.rank}")
    for name, counters in groups.items():
        yield Problem(f"{name}: {', '.join(counters[:_SHOWN])}", "steps-differ", tensor=name)


class StepCounters:
    """The step counters of an optimizer's parameters: tensors of one element each.

    ``taken`` has the largest of each optimizer, those of DeepSpeed's buffers included, which are of
    many parameters.
    """

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self._values: dict[float, list[str]] = {}

    def read(self, located: Iterable[TensorEntry], source: Files, *, announced: bool) -> None:
        """Read the counters among some tensors; they may have been ``announced`` before."""
        jobs = list(_counter_jobs(located))
        if announced:
            jobs = [job._replace(runs=()) for job in jobs]
        if not jobs:
            return  # without numpy, which takes long to import
        read_tiles(TensorSource(source), jobs, self._collect, 1)

    def _collect(self, entry: TensorEntry, tiles: Iterator[TensorTile]) -> None:
        from ckptool.engine.read.numbers import decode

        with suppress(CkptoolError):
            for tile in tiles:
                value = float(decode(tile.values.reshape(-1), entry.source_dtype)[0])
                optimizer = StateName.of(entry.name).optimizer
                self.taken[optimizer] = max(self.taken.get(optimizer, value), value)
                if entry.name.endswith(_COUNTER):
                    self._values.setdefault(value, []).append(entry.name)

    def problems(self, surveyed: Survey) -> Iterator[Problem]:
        """Yield a problem if the counters differ.

        Each optimizer counts for itself (a GAN has two). Experts may have been chosen less often:
        those so named, and in a model with experts any parameter with a number alone. Unused
        parameters have a state of zeros from when it was made (Adagrad, torch's
        ``get_optimizer_state_dict``), and whole parts of a model may have been frozen at first.
        """
        if len(self._values) < 2:
            return
        most, catalog = max(self._values), surveyed.catalog
        fewer = {value: names for value, names in self._values.items() if value < most}
        of_experts = has_experts(catalog)
        odd = [
            name
            for names in fewer.values()
            for name in names
            if _EXPERT not in name and not (of_experts and name.split(".")[-2].isdigit())
        ]
        used = {*odd} - _without_state(odd, surveyed) if odd else set()
        fewer = {value: [n for n in names if n in used] for value, names in fewer.items()}
        values = _differing_counters(self._values | fewer)
        code = code_of_fewer(values, catalog) if catalog else "steps-differ"
        if len(values) < 2 or code is None:
            return
        code = code if len(values) <= _FEW_VALUES else "steps-scattered"
        ordered = sorted(values.items(), key=lambda pair: len(pair[1]))
        parts = [f"{value:g} for {list_some(names, 1)}" for value, names in ordered[: _SHOWN + 1]]
        more = f" and {len(ordered) - len(parts)} more values" if len(ordered) > len(parts) else ""
        message = f"the optimizer's step counters are {'; '.join(parts)}{more}"
        yield Problem(message, code, tensor=ordered[0][1][0])


def _differing_counters(values: Mapping[float, Sequence[str]]) -> dict[float, list[str]]:
    """Return the counters of those optimizers that have different ones."""
    optimizers: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    for value, names in values.items():
        for name in names:
            optimizers[StateName.of(name).optimizer][value].append(name)
    differing: dict[float, list[str]] = defaultdict(list)
    for counters in optimizers.values():
        for value, names in counters.items() if len(counters) > 1 else ():
            differing[value] += names
    return differing


def has_experts(catalog: Catalog | None) -> bool:
    """Return whether a checkpoint has experts, by the names of its tensors."""
    return catalog is not None and any(_EXPERT in name for name in catalog.tensors)


def _without_state(counters: Sequence[str], surveyed: Survey) -> set[str]:
    """Return the counters of parameters whose other state is all zero, or missing."""
    counter_of = {name.rpartition(".")[0]: name for name in counters}
    tensors = surveyed.catalog.tensors if surveyed.catalog else {}
    heads = ((name, counter_of.get(name.rpartition(".")[0])) for name in tensors)
    states = locate_whole(
        surveyed, (name for name, counter in heads if counter not in (None, name))
    )
    found = measure_each(states.values(), surveyed.source, _has_values)
    used = {counter_of[name.rpartition(".")[0]] for name in states if found.get(name, True)}
    return {*counters} - used


def _has_values(entry: TensorEntry, tiles: Iterator[TensorTile]) -> bool:
    return any(tile.values.any() for tile in tiles)


def _counter_jobs(
    located: Iterable[TensorEntry],
) -> Iterator[Job[TensorEntry, TensorReader, TensorTile]]:
    """Yield the jobs that read the step counters of one element, each from its first chunk.

    A counter that parameters share, as DeepSpeed's do, is read once.
    """
    shared = set[Place]()
    for entry in located:
        is_own = entry.name.endswith(_COUNTER) and state_category(entry) == "optimizer"
        is_counter = is_own or entry.name.startswith(_OF_BUFFERS)
        if is_counter and entry.elements == 1 and entry.source_dtype.is_numeric:
            chunks = (c for c in entry.chunks if c.box.volume and not isinstance(c.at, Container))
            for chunk in islice(chunks, 1):
                if is_own or chunk.at not in shared:
                    yield place_job(entry, chunk.at, chunk.box.shape, entry.source_dtype.itemsize)
                shared.add(chunk.at)
