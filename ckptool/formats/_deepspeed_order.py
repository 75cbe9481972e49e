"""Names for an optimizer's numbered parameters, where only order and shapes tell them.

Without ZeRO, DeepSpeed saves the optimizer as torch does: its parameters are numbers. Each of its
groups lists parameters in the order of the module; which parameter is in which group, or frozen,
follows from the shapes, unless several answers fit.
"""

from __future__ import annotations

from collections.abc import Sequence

_Shape = tuple[int, ...]
_MOST_STATES = 20_000


def names_by_order(
    names: Sequence[tuple[str, _Shape]], groups: Sequence[Sequence[_Shape | None]]
) -> list[list[str]] | None:
    """The names of each group's parameters; None where no answer fits, or more than one.

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
