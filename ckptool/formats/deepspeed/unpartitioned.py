"""The optimizer of DeepSpeed without ZeRO: whole tensors, numbered and not named.

Read: torch's own state dict (fp32 training); ``FP16_UnfusedOptimizer``, with masters by group;
``FP16_Optimizer``, with one flat tensor a group (``runtime/fp16``, DeepSpeed 0.3 to 0.19).

Names for an optimizer's numbered parameters, where only order and shapes tell them.

Without ZeRO, DeepSpeed saves the optimizer as torch does: its parameters are numbers. Each of its
groups lists parameters in the order of the module; which parameter is in which group, or frozen,
follows from the shapes, unless several answers fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.formats.deepspeed.partitions import MASTER, RankContents, Run, run_chunks
from ckptool.formats.deepspeed.states import State, Vector, require_shallow

_Shape = tuple[int, ...]
_Shapes = Mapping[str, _Shape]


def add_whole_optimizer(
    found: RankContents,
    state: State,
    weights: Mapping[str, Vector],
    rank: int,
    experts: Mapping[str, Vector] | None = None,
) -> list[str] | None:
    """Add masters and moments under the names of ``weights``; the trained ones are returned.

    ``experts`` are those of the rank's experts, which have groups of their own. None, with nothing
    added, where order and shapes do not tell the names.
    """
    torch_state = state.inner("optimizer_state_dict") if _wraps(state) else state
    stored = torch_state.groups()
    groups = [group.get("params", []) for group in stored]
    every = {**weights, **(experts or {})}
    shapes = {name: vector.shape for name, vector in every.items()}
    flats = state.get("fp32_groups_flat")
    if isinstance(flats, list):
        return None if experts else _add_flat(found, state, torch_state, flats, shapes, rank)
    masters = _masters(state, groups)
    kept = {i: require_shallow(own) for i, own in torch_state.inner("state").fields.items()}
    wanted = [[_shape(torch_state, kept.get(i), masters.get(i)) for i in group] for group in groups]
    of_experts = [experts is not None and group.get("moe") is True for group in stored]
    named = _named(weights, experts or {}, wanted, of_experts)
    if named is None:
        return None
    used = []
    for index, name in (
        (i, n) for g, own in zip(groups, named, strict=True) for i, n in zip(g, own, strict=True)
    ):
        master = masters.get(index) or (None if _wraps(state) else every[name])
        if index not in masters and index not in kept:
            continue
        used.append(name)
        if master is not None:
            found.add_whole((MASTER, name), master, rank)
        _add_states(found, torch_state, kept.get(index), name, shapes[name], rank)
    return used


def _named(
    weights: Mapping[str, Vector],
    experts: Mapping[str, Vector],
    wanted: Sequence[Sequence[_Shape | None]],
    of_experts: Sequence[bool],
) -> list[list[str]] | None:
    """Return the names of each group's parameters; groups ``of_experts`` hold experts alone."""
    found: list[list[str]] = [[] for _ in wanted]
    for pool, moe in ((weights, False), (experts, True)):
        numbers = [number for number, own in enumerate(of_experts) if own is moe]
        known = [(name, vector.shape) for name, vector in pool.items()]
        named = names_by_order(known, [wanted[number] for number in numbers])
        if named is None:
            return None
        for number, names in zip(numbers, named, strict=True):
            found[number] = names
    return found


def _wraps(state: State) -> bool:
    """Return whether DeepSpeed's own optimizer wraps torch's."""
    return "optimizer_state_dict" in state.fields


def _masters(state: State, groups: Sequence[Sequence[Any]]) -> dict[Any, Vector]:
    stored = state.get("fp32_groups") or []
    found = {}
    for group, values in zip(groups, stored, strict=False):
        for index, value in zip(group, values if isinstance(values, list) else [], strict=False):
            vector = state.vector(value)
            if vector is not None:
                found[index] = vector
    return found


def _shape(state: State, kept: Any, master: Vector | None) -> _Shape | None:
    """Return the shape of a numbered parameter: that of its master, or of its moments."""
    if master is not None:
        return master.shape
    vectors = [state.vector(value) for value in (kept if isinstance(kept, dict) else {}).values()]
    shapes = {vector.shape for vector in vectors if vector is not None and vector.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _add_states(
    found: RankContents, state: State, kept: Any, name: str, shape: _Shape, rank: int
) -> None:
    for kind, value in (kept if isinstance(kept, dict) else {}).items():
        vector = state.vector(value)
        if vector is not None and vector.shape == shape:
            found.add_whole((str(kind), name), vector, rank)
        else:
            found.add_leaf((str(kind), name), vector or value, rank)


def _add_flat(
    found: RankContents,
    state: State,
    torch_state: State,
    flats: list[Any],
    shapes: _Shapes,
    rank: int,
) -> list[str] | None:
    """One flat tensor a group. The names are known where one group holds all parameters."""
    vectors = [vector for value in flats if (vector := state.vector(value)) is not None]
    total = sum(math.prod(shape) for shape in shapes.values())
    if len(vectors) != 1 or vectors[0].shape != (total,):
        return None
    kept = require_shallow(torch_state.inner("state").fields.get(0))
    kinds: dict[str, Vector] = {MASTER: vectors[0]}
    for kind, value in (kept if isinstance(kept, dict) else {}).items():
        vector = torch_state.vector(value)
        if vector is not None and vector.shape == (total,):
            kinds[str(kind)] = vector
        else:
            for name in shapes:
                found.add_leaf((str(kind), name), vector or value, rank)
    offset = 0
    for name, shape in shapes.items():
        run = Run(name, 0, math.prod(shape), 0, offset)
        for kind, vector in kinds.items():
            chunks = run_chunks(run, shape, vector.at, vector.dtype.itemsize, rank)
            found.add((kind, name), vector.dtype, shape, chunks)
        offset += run.stop
    return list(shapes)


_MOST_STATES = 20_000


def names_by_order(
    names: Sequence[tuple[str, _Shape]], groups: Sequence[Sequence[_Shape | None]]
) -> list[list[str]] | None:
    """Return the names of each group's parameters; None where no answer fits, or more than one.

    ``names`` are all parameters with their shapes, in the order of the module. A shape of None
    fits every parameter.
    """
    states: dict[tuple[int, ...], int] = {(0,) * len(groups): 1}
    history = []
    needed = sum(map(len, groups))
    for at, (_, shape) in enumerate(names):
        steps = _steps(states, shape, groups, needed - (len(names) - at - 1))
        if not steps or len(steps) > _MOST_STATES:
            return None
        history.append(steps)
        states = {state: sum(count for _, _, count in came) for state, came in steps.items()}
    end = tuple(map(len, groups))
    return _followed(names, history, end) if states.get(end) == 1 else None


_Came = list[tuple[tuple[int, ...], int | None, int]]
"""The states that lead to one: which it was, the group that took the parameter, and the ways."""


def _steps(
    states: dict[tuple[int, ...], int],
    shape: _Shape,
    groups: Sequence[Sequence[_Shape | None]],
    least: int,
) -> dict[tuple[int, ...], _Came]:
    """The states after one more parameter, of which at least ``least`` must have been taken."""
    found: dict[tuple[int, ...], _Came] = {}
    for state, count in states.items():
        if sum(state) >= least:
            found.setdefault(state, []).append((state, None, count))
        if sum(state) + 1 < least:
            continue
        for number, group in enumerate(groups):
            taken = state[number]
            if taken < len(group) and group[taken] in (None, shape):
                after = (*state[:number], taken + 1, *state[number + 1 :])
                found.setdefault(after, []).append((state, number, min(count, 2)))
    return found


def _followed(
    names: Sequence[tuple[str, _Shape]],
    history: list[dict[tuple[int, ...], _Came]],
    end: tuple[int, ...],
) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in end]
    state = end
    for (name, _), steps in zip(reversed(names), reversed(history), strict=True):
        state, group, _ = steps[state][0]
        if group is not None:
            found[group].append(name)
    return [group[::-1] for group in found]
