"""Optimizer state that is not the model's: of parameters that it, or the optimizer's own groups, do
not have, of all layers but one, or of none at all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from ckptool.commands.open import Survey
from ckptool.commands.verify.checks.meaning.trainer_counts import number_in, trainers_of
from ckptool.commands.verify.checks.meaning.weights import are_of_a_branch
from ckptool.commands.verify.checks.optimizer_names import Group, groups_of, moments_in
from ckptool.commands.verify.checks.training import has_experts, models_by_tail
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.keymap.model import abstract
from ckptool.core.quantization.master_names import keys_of
from ckptool.core.state_category import is_master, optimizer_names, state_category
from ckptool.core.text import list_some, plural
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.companions import trainer_optimizer
from ckptool.serialization.state_dict.leaves import read_file_leaves
from ckptool.storage.files import Files

_FEW = 2
_LAYERS = 4
"""Layers besides one that may well have state by chance alone."""
_BESIDE = 3
"""Parameters before and after one that tell what it is."""
_OF_ADAM = re.compile(r"(?:(.+)\.)?param_groups\..+\.betas")
"""An option of optimizers that keep moments of all that they step."""
_FIRST = 2
"""Steps after the one that makes the state."""
_SMALL = 1 << 20
"""Bytes of a file that may hold an optimizer without state."""

States = Mapping[str, Sequence[TensorEntry]]
"""The moments of each parameter: by its name, or by its number among those of an optimizer."""
Models = Mapping[str, TensorEntry]
"""The model's tensors, by name and by name without the first step."""
Weights = Mapping[str, set[str]]
"""The names of the model's tensors that each parameter may be."""


def unfit_state_problems(catalog: Catalog) -> Iterator[Problem]:
    """Yield the state that does not fit the parameters, by names and shapes alone.

    A resume ignores it, or the optimizer is another model's.
    """
    by_name: dict[str, list[TensorEntry]] = defaultdict(list)
    by_number: dict[str, dict[str, list[TensorEntry]]] = defaultdict(lambda: defaultdict(list))
    for name, of in moments_in(catalog.tensors):
        entry = catalog.tensors[name]
        if state_category(entry) != "optimizer":
            continue
        if of.parameter.isdigit():
            by_number[of.optimizer][of.parameter].append(entry)
        else:
            by_name[of.parameter].append(entry)
    if by_name:
        models = models_by_tail(catalog.tensors)
        weights = {parameter: _weights_of(parameter, models) for parameter in by_name}
        yield from _check_extra(_foreign_state(catalog, by_name, models, weights), "the model does")
        yield from _layer_gaps(catalog, models, weights)
    groups: dict[str, list[Group]] = defaultdict(list)
    for group in groups_of(catalog) if by_number else ():
        groups[group.optimizer].append(group)
    for optimizer, states in by_number.items():
        numbers = {str(n) for g in groups[optimizer] for n in g.parameters if type(n) is int}
        if numbers:
            extra = {number: moments for number, moments in states.items() if number not in numbers}
            yield from _check_extra(extra, "the optimizer's groups do")
        if len(gaps := numbers - states.keys()) == 1 and not has_experts(catalog):
            yield from _numbered_gaps(gaps.pop(), groups[optimizer], states)


def _numbered_gaps(number: str, groups: Iterable[Group], states: States) -> Iterator[Problem]:
    """Yield a problem if the one parameter without state has twins with state around it.

    Numbers are in the order of a model, so the shapes before and after a parameter tell what it is.
    Its twins, with the same shapes around them, are in layers before and after.
    """
    group = next(g for g in groups if number in map(str, g.parameters))
    shapes = [states[n][0].shape if n in states else None for n in map(str, group.parameters)]
    at = shapes.index(None)
    twins = [
        place
        for place in range(_BESIDE, len(shapes) - _BESIDE)
        if place != at and _around(shapes, place) == _around(shapes, at)
    ]
    is_inside = _BESIDE <= at < len(shapes) - _BESIDE
    if is_inside and len(twins) >= _LAYERS and min(twins) < at < max(twins):
        name = group.state_of(number)
        message = f"{name}: without optimizer state, which {len(twins)} others between"
        message += " parameters of the same shapes have"
        yield Problem(message, "optimizer-incomplete")


def _around(shapes: Sequence[object], at: int) -> Sequence[object]:
    return [*shapes[at - _BESIDE : at], *shapes[at + 1 : at + _BESIDE + 1]]


def _check_extra(extra: States, who: str) -> Iterator[Problem]:
    names = [entry.name for states in extra.values() for entry in states]
    if names:
        message = f"{list_some(names, _FEW)}: optimizer state of"
        message += f" {plural(len(extra), 'parameter')} that {who} not have"
        yield Problem(message, "optimizer-extra", tensor=names[0])


def _foreign_state(catalog: Catalog, states: States, models: Models, weights: Weights) -> States:
    """Return the state of layers and experts that the model lacks, unless it lacks most of them.

    Names that differ from the model's by more than numbers may be right: torchtitan 0.3 saves parts
    of a fused weight, but the state of the whole. A tied parameter may have another name in the
    model: that of a weight of the same shape without state.
    """
    extra = [n for n in states if not weights[n] and n not in catalog.conflicts]
    if not extra or 2 * len(extra) >= len(states):
        return {}
    kinds = {kind for name in models if (kind := abstract(name)[0])}
    with_state = {name for names in weights.values() for name in names}
    shapes = {m.shape for m in models.values() if m.name not in with_state}
    return {
        name: states[name]
        for name in extra
        if abstract(name)[0] in kinds and not any(state.shape in shapes for state in states[name])
    }


def _weights_of(parameter: str, models: Models) -> set[str]:
    """Return the names of the model's tensors that may be a parameter."""
    keys = (key for key, _ in keys_of(parameter))
    return {models[key].name for key in keys if key in models}


def stateless_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield a problem if an optimizer has no state at all, though it has taken steps.

    The first step makes the state: what is loaded into an optimizer before that may be lost.
    """
    for trainer, step, values in trainers_of(surveyed, catalog):
        steps = step - (number_in(values, trainer.skipped) or 0)
        if number_in(values, trainer.stepped) != step or steps < _FIRST:
            continue
        file, names = _stateless_optimizer(surveyed.source, catalog)
        group = next((name for name in names if _OF_ADAM.fullmatch(name)), None)
        if group is not None:
            message = f"{file or group.rpartition('.param_groups')[0]}: no optimizer state at all,"
            message += f" but {trainer.step} is {step:,}: a resume begins the optimizer again"
            yield Problem(message, "moments-zero", file=file)


def _stateless_optimizer(source: Files, catalog: Catalog) -> tuple[str | None, Sequence[str]]:
    """Return the file beside the model, if it has one, and the values of a stateless optimizer."""
    name = trainer_optimizer(source.files, catalog.files)
    if name is not None and source.files[name] <= _SMALL:
        with suppress(CkptoolError):  # said by its own check
            leaves = read_file_leaves(source, name)
            return name, [] if any(".state." in f".{leaf}" for leaf in leaves) else [*leaves]
    if name or not catalog.objects:
        return None, []
    states = optimizer_names(catalog) - catalog.objects.keys()
    if not all(map(is_master, states)):
        return None, []
    return None, [*catalog.objects]


def _layer_gaps(catalog: Catalog, models: Models, weights: Weights) -> Iterator[Problem]:
    """Yield the weights without state of one layer in the middle, if all other layers have it.

    Layers are frozen as a whole; of the first, the last, and a branch of one, parts may be unused.
    """
    with_state = {name for names in weights.values() for name in names}
    layers: dict[str, dict[int, str]] = defaultdict(dict)
    for name in {entry.name for entry in models.values()} - catalog.conflicts.keys():
        kind, numbers = abstract(name)
        if len(numbers) == 1:
            layers[kind][numbers[0]] = name
    lacking: dict[int, list[str]] = defaultdict(list)
    having: dict[int, list[str]] = defaultdict(list)
    for row in layers.values():
        for number, name in row.items():
            if name in with_state:
                having[number].append(name)
        gaps = [number for number, name in row.items() if name not in with_state]
        if len(gaps) == 1 and len(row) > _LAYERS and min(row) < gaps[0] < max(row):
            lacking[gaps[0]].append(row[gaps[0]])
    for number, names in lacking.items():
        if len(having[number]) >= len(names) and not are_of_a_branch(names, having[number]):
            message = f"{list_some(sorted(names), _FEW)}: without optimizer state, which all other"
            yield Problem(f"{message} layers have of it", "optimizer-incomplete", tensor=min(names))
