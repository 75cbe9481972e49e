"""The optimizer of DeepSpeed without ZeRO: whole tensors, numbered instead of named.

Read: torch's own state dict (fp32 training); ``FP16_UnfusedOptimizer``, with masters by group;
``FP16_Optimizer``, with one flat tensor per group (``runtime/fp16``, DeepSpeed 0.3 to 0.19).

Each group lists parameters in the order of the module; which parameter is in which group, or
frozen, follows from the shapes, unless several answers fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ckptool.formats.deepspeed.experts import find_lost_optimizers, read_experts, select_experts
from ckptool.formats.deepspeed.flat_runs import MASTER, FlatRun, RankContents, Shapes, lift_state
from ckptool.formats.deepspeed.states import (
    State,
    dict_or_empty,
    read_optimizer_leaves,
    read_raw_leaves,
    require_all_tensors,
    require_shallow_dict,
)
from ckptool.formats.deepspeed.weights import select_weights
from ckptool.serialization.state_dict.leaves import PlainLeaf

_MOST_STATES = 20_000
"""Ways to fill the groups so far that are followed; each parameter more may multiply them."""
_UNNAMED = (
    "without ZeRO the optimizer's parameters are numbered, and their shapes match several names:"
    " kept as optimizer.state.<number>"
)
_BY_ORDER = "without ZeRO the optimizer's parameters are numbered: named by their order and shapes"
_Shape = tuple[int, ...]


def add_whole_optimizers(
    contents: RankContents, checkpoint: DeepSpeedCheckpoint, mp: int
) -> set[str] | None:
    """Add the optimizer of ZeRO 0, or each expert-parallel rank's; return the trained parameters.

    None if their names are not known: the content of the files is then added by number.
    """
    model, by_expert = checkpoint.models[0, mp], checkpoint.expert_optimizers
    files = checkpoint.select(by_expert or {(0, mp): model}, mp)
    if find_lost_optimizers(checkpoint) is not None:
        return None
    if not by_expert and not dict_or_empty(model.stored.get("optimizer")):
        return None
    experts = read_experts(checkpoint, mp) if by_expert else {}
    modules = [model.inner("module"), *experts.values()]
    require_all_tensors(*modules)
    weights = select_weights(model)
    trained: set[str] = set()
    unnamed = False
    for file in files:
        inner, rank = file.state.inner("optimizer"), file.rank
        leaves: Mapping[str, PlainLeaf] | None = {}
        if by_expert:
            strays = {key: v for key, v in file.state.stored.items() if key != "optimizer"}
            contents.add_stray(file.state.file.what, strays, file.rank)
            leaves = select_experts(experts, inner, file.dp)
        names = None if leaves is None else _add_optimizer(contents, inner, weights, rank, leaves)
        if len(names or ()) < len(weights) + len(leaves or ()):
            require_all_tensors(*modules, values=True)
        if names is None:
            unnamed = True
            contents.add_leaves(read_raw_leaves(inner, checkpoint.source), rank)
        else:
            trained.update(names)
            contents.add_leaves(read_optimizer_leaves(inner, checkpoint.source), rank)
    checkpoint.notes.append(_UNNAMED if unnamed else _BY_ORDER)
    return None if unnamed else trained


def _add_optimizer(
    contents: RankContents,
    state: State,
    weights: Mapping[str, PlainLeaf],
    rank: int,
    experts: Mapping[str, PlainLeaf],
) -> list[str] | None:
    """Add masters and moments under the names of ``weights``; return those that were trained.

    ``experts`` are those of the rank's experts, which have groups of their own. None, with nothing
    added, if order and shapes do not determine the names.
    """
    is_wrapped = "optimizer_state_dict" in state.fields  # torch's optimizer inside DeepSpeed's
    inner = state.inner("optimizer_state_dict") if is_wrapped else state
    stored = inner.groups()
    groups = [group.get("params", []) for group in stored]
    parameters = {**weights, **experts}
    shapes = {name: vector.shape for name, vector in parameters.items()}
    flats = state.get("fp32_groups_flat")
    if isinstance(flats, list):
        return None if experts else _add_flat(contents, state, inner, flats, shapes, rank)
    masters = _find_masters(state, groups)
    moments = {
        number: lift_state(require_shallow_dict(values))
        for number, values in inner.inner("state").fields.items()
    }
    group_shapes = [
        [_find_shape(inner, moments.get(i), masters.get(i)) for i in group] for group in groups
    ]
    of_experts = [bool(experts) and group.get("moe") is True for group in stored]
    group_names = _name_parameters(weights, experts, group_shapes, of_experts)
    if group_names is None:
        return None
    numbers = [number for group in groups for number in group]
    trained = []
    for number, name in zip(numbers, (n for names in group_names for n in names), strict=True):
        if number not in masters and number not in moments:
            continue
        trained.append(name)
        master = masters.get(number) or (None if is_wrapped else parameters[name])
        if master is not None:
            contents.add_whole((MASTER, name), master, rank)
        for kind, value in moments.get(number, {}).items():
            vector = inner.vector(value)
            if vector is not None and vector.shape == shapes[name]:
                contents.add_whole((str(kind), name), vector, rank)
            else:
                contents.add_leaf((str(kind), name), vector or value, rank)
    return trained


def _name_parameters(
    weights: Mapping[str, PlainLeaf],
    experts: Mapping[str, PlainLeaf],
    groups: Sequence[Sequence[_Shape | None]],
    of_experts: Sequence[bool],
) -> list[list[str]] | None:
    """Return the names of each group's parameters; groups ``of_experts`` contain only experts."""
    names_by_group: list[list[str]] = [[] for _ in groups]
    for pool, moe in ((weights, False), (experts, True)):
        numbers = [number for number, is_expert in enumerate(of_experts) if is_expert is moe]
        parameters = [(name, vector.shape) for name, vector in pool.items()]
        answer = name_by_order(parameters, [groups[number] for number in numbers])
        if answer is None:
            return None
        for number, names in zip(numbers, answer, strict=True):
            names_by_group[number] = names
    return names_by_group


def _find_masters(state: State, groups: Sequence[Sequence[Any]]) -> dict[Any, PlainLeaf]:
    masters = {}
    for group, values in zip(groups, state.get("fp32_groups") or [], strict=False):
        for number, value in zip(group, values if isinstance(values, list) else [], strict=False):
            vector = state.vector(value)
            if vector is not None:
                masters[number] = vector
    return masters


def _find_shape(state: State, moments: Any, master: PlainLeaf | None) -> _Shape | None:
    """Return the shape of a numbered parameter: that of its master, or of its moments."""
    if master is not None:
        return master.shape
    vectors = map(state.vector, dict_or_empty(moments).values())
    shapes = {vector.shape for vector in vectors if vector is not None and vector.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _add_flat(
    contents: RankContents,
    state: State,
    inner: State,
    flats: list[Any],
    shapes: Shapes,
    rank: int,
) -> list[str] | None:
    """Add one flat tensor per group. The names are known if one group has all parameters."""
    vectors = [vector for value in flats if (vector := state.vector(value)) is not None]
    total = sum(math.prod(shape) for shape in shapes.values())
    if len(vectors) != 1 or vectors[0].shape != (total,):
        return None
    kinds: dict[str, PlainLeaf] = {MASTER: vectors[0]}
    moments = require_shallow_dict(inner.inner("state").fields.get(0))
    for kind, value in lift_state(moments).items():
        vector = inner.vector(value)
        if vector is not None and vector.shape == (total,):
            kinds[str(kind)] = vector
        else:
            for name in shapes:
                contents.add_leaf((str(kind), name), vector or value, rank)
    offset = 0
    for name, shape in shapes.items():
        run = FlatRun(name, 0, math.prod(shape), 0, offset)
        for kind, vector in kinds.items():
            contents.add_run((kind, name), run, shape, vector, rank)
        offset += run.stop
    return list(shapes)


def name_by_order(
    names: Sequence[tuple[str, _Shape]], groups: Sequence[Sequence[_Shape | None]]
) -> list[list[str]] | None:
    """Return the names of each group's parameters; None if no answer fits, or more than one.

    ``names`` are all parameters with their shapes, in the order of the module. A shape of None fits
    every parameter.
    """
    states: dict[tuple[int, ...], int] = {(0,) * len(groups): 1}
    history = []
    total = sum(map(len, groups))
    for at, (_, shape) in enumerate(names):
        steps = _advance(states, shape, groups, total - (len(names) - at - 1))
        if not steps or len(steps) > _MOST_STATES:
            return None
        history.append(steps)
        states = {state: sum(count for _, _, count in came) for state, came in steps.items()}
    end = tuple(map(len, groups))
    return _trace_back(names, history, end) if states.get(end) == 1 else None


_Came = list[tuple[tuple[int, ...], int | None, int]]
"""The states that lead to one: the state, the group that took the parameter, and the ways."""


def _advance(
    states: dict[tuple[int, ...], int],
    shape: _Shape,
    groups: Sequence[Sequence[_Shape | None]],
    least: int,
) -> dict[tuple[int, ...], _Came]:
    """Return the states after one more parameter, if groups have at least ``least`` of them."""
    steps: dict[tuple[int, ...], _Came] = {}
    for state, count in states.items():
        if sum(state) >= least:
            steps.setdefault(state, []).append((state, None, count))
        if sum(state) + 1 < least:
            continue
        for number, group in enumerate(groups):
            size = state[number]
            if size < len(group) and group[size] in (None, shape):
                larger = (*state[:number], size + 1, *state[number + 1 :])
                steps.setdefault(larger, []).append((state, number, min(count, 2)))
    return steps


def _trace_back(
    names: Sequence[tuple[str, _Shape]],
    history: list[dict[tuple[int, ...], _Came]],
    end: tuple[int, ...],
) -> list[list[str]]:
    groups: list[list[str]] = [[] for _ in end]
    state = end
    for (name, _), steps in zip(reversed(names), reversed(history), strict=True):
        state, group, _ = steps[state][0]
        if group is not None:
            groups[group].append(name)
    return [group[::-1] for group in groups]
