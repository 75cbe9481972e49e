"""Masters and moments of ZeRO 1 and 2: named tensors out of flat partitions.

DeepSpeed 0.4 to 0.19. ``param_slice_mappings`` are not looked at: under round-robin gradients they
tell the offsets of another order than the one the partitions have. ``param_shapes`` are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_expert_files import EXPERT
from ckptool.formats._deepspeed_flat import Shapes, flat_runs
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_muon import Touched, touched_by, whole_runs, whole_states
from ckptool.formats._deepspeed_read import State, require_shallow
from ckptool.formats._deepspeed_slots import (
    Partition,
    Slot,
    add_other,
    add_run,
    refuse_kinds,
    require_distinct_ranks,
    slot_of,
)
from ckptool.formats._storage import natural

_ANY = 1 << 62


def add_flat_groups(
    found: Holding, ranks: Sequence[Partition], groups: Sequence[Shapes], *, data_first: bool
) -> None:
    """Add the tensors of ZeRO 1, ZeRO 2 or BF16_Optimizer.

    A group of experts has fewer partitions than there are ranks; ``data_first`` says that ranks
    of one expert follow one another.
    """
    order = _group_names(ranks[0].state)
    slots = [_in_order(_slots_of(rank.state), _group_names(rank.state), order) for rank in ranks]
    if any(len(held) != len(groups) for held in slots):
        counts = sorted({len(held) for held in slots})
        raise Damaged(
            Problem(
                f"{ranks[0].state.file.what}: {counts} flat groups, {len(groups)} of names",
                "tensor-record",
            )
        )
    require_distinct_ranks(ranks, slots)
    counts = _partition_counts(ranks[0].state, len(groups), len(ranks))
    paddings = _paddings(ranks[0].state, groups)
    for number, shapes in enumerate(groups):
        held = [slot[number] for slot in slots]
        parts = counts[number]
        experts = len(ranks) // parts
        named = [_global_names(shapes, expert_rank) for expert_rank in range(experts)]
        every = [name for names in named for name in names.values()]
        refuse_kinds(found, held, every, ranks[0].rank)
        for expert_rank, names in enumerate(named):
            chosen = _members(len(ranks), parts, expert_rank, data_first)
            members = [(ranks[dp], held[dp]) for dp in chosen]
            _add_group(found, members, shapes, names, paddings[number])
        add_other(found, ranks, held, number)


def _group_names(state: State) -> list[tuple[Any, int]]:
    """The names of the optimizer's groups, as groups of experts have them, each with its count."""
    if not isinstance(state.stored.get("base_optimizer_state"), dict):
        return []
    names = [group.get("name") for group in state.inner("base_optimizer_state").groups()]
    return [(name, names[:at].count(name)) for at, name in enumerate(names)]


def _in_order(
    slots: list[Slot], names: list[tuple[Any, int]], order: list[tuple[Any, int]]
) -> list[Slot]:
    """The groups as the first rank has them: DeepSpeed sorts groups of experts by random hashes."""
    if len(order) != len(slots) or set(names) != set(order):
        return slots
    return [slots[names.index(name)] for name in order]


def _members(ranks: int, parts: int, expert_rank: int, data_first: bool) -> list[int]:
    """The data-parallel ranks that hold the partitions of one expert-parallel rank, in order."""
    experts = ranks // parts
    first, step = (expert_rank * parts, 1) if data_first else (expert_rank, experts)
    return [first + step * part for part in range(parts)]


def _partition_counts(state: State, groups: int, ranks: int) -> list[int]:
    stored = state.get("partition_count")
    counts = list(map(natural, stored if isinstance(stored, list | tuple) else [stored] * groups))
    if len(counts) != groups or any(not count or ranks % count for count in counts):
        raise Damaged(
            Problem(
                f"{state.file.what}: partition_count {counts} for {groups} groups and {ranks}"
                " ranks",
                "tensor-record",
            )
        )
    return counts


def _paddings(state: State, groups: Sequence[Shapes]) -> list[list[int]]:
    """The elements left free after each parameter, by group (since 0.19.8; none before)."""
    if not state.get("param_alignment_paddings"):
        return [[0] * len(group) for group in groups]
    stored = [list(map(natural, group)) for group in state.sequence("param_alignment_paddings")]
    if list(map(len, stored)) != list(map(len, groups)):
        raise Damaged(
            Problem(
                f"{state.file.what}: param_alignment_paddings do not fit param_shapes",
                "tensor-record",
            )
        )
    return stored


def _slots_of(state: State) -> list[Slot]:
    """The groups of one rank's file.

    Masters are stored without the padding at their end, moments with it; an elastic checkpoint
    stores both without, as a list of dicts. Versions before 0.16 tell all padding as the last
    rank's, 0.5 does not tell it.
    """
    masters = state.sequence("single_partition_of_fp32_groups")
    paddings = list(map(natural, state.get("group_paddings") or [_ANY] * len(masters)))
    kept = _kept_states(state, len(masters))
    slots = []
    for master, padding, values in zip(masters, paddings, kept, strict=False):
        slots.append(slot_of(state, master, values, padding))
    return slots


def _kept_states(state: State, groups: int) -> list[Mapping[str, Any]]:
    base = state.fields.get("base_optimizer_state")
    if isinstance(base, list):
        kept = [value if isinstance(value, dict) else {} for value in map(require_shallow, base)]
        return [*kept, *[{}] * (groups - len(kept))]
    inner = state.inner("base_optimizer_state")
    by_index = inner.inner("state").fields
    values = [require_shallow(by_index.get(index)) for index in _indices(inner, groups)]
    return [value if isinstance(value, dict) else {} for value in values]


def _indices(base: State, groups: int) -> list[Any]:
    """The index that the optimizer's state gives to each group's one flat parameter."""
    found: list[Any] = list(range(groups))
    for number, group in enumerate(base.groups()):
        params = group.get("params")
        if number < groups and isinstance(params, list) and params:
            found[number] = params[0]
    return found


def _add_group(
    found: Holding,
    members: Sequence[tuple[Partition, Slot]],
    shapes: Shapes,
    names: Mapping[str, str],
    paddings: Sequence[int],
) -> None:
    size = max(vector.shape[0] for _, slot in members for vector in slot.flat.values())
    runs = list(flat_runs(shapes, paddings, size, len(members)))
    _add_whole_states(found, members, shapes, names, touched_by(runs, len(members)))
    for kind in dict.fromkeys(kind for _, slot in members for kind in slot.flat):
        for name, shape in shapes.items():
            found.add((kind, names[name]), _dtype(members, kind), shape, [])
        for run in runs:
            partition, slot = members[run.part]
            add_run(found, partition, slot.flat.get(kind), kind, run, shapes, names[run.name])
    for partition, slot in members:
        for kind, value in slot.scalars.items():
            for name in names.values():
                found.add_leaf((kind, name), value, partition.rank)


def _add_whole_states(
    found: Holding,
    members: Sequence[tuple[Partition, Slot]],
    shapes: Shapes,
    names: Mapping[str, str],
    touched: Touched,
) -> None:
    """Add, and take out of the slots, the states that hold whole parameters."""
    for kind, vectors in whole_states([slot for _, slot in members], touched, shapes):
        for part, ((partition, _), vector) in enumerate(zip(members, vectors, strict=True)):
            for run in whole_runs(touched[part], shapes, part):
                add_run(found, partition, vector, kind, run, shapes, names[run.name])


def _dtype(members: Sequence[tuple[Partition, Slot]], kind: str) -> Any:
    return next(slot.flat[kind].dtype for _, slot in members if kind in slot.flat)


def _global_names(shapes: Shapes, expert_rank: int) -> dict[str, str]:
    """The names with global expert numbers; the group's own count experts from zero on each rank.

    DeepSpeed numbers experts by expert-parallel rank, then by their number on the rank.
    """
    matches = {name: EXPERT.fullmatch(name) for name in shapes}
    local: dict[str, int] = {}
    for match in filter(None, matches.values()):
        local[match["head"]] = max(local.get(match["head"], 0), int(match["number"]) + 1)
    return {
        name: f"{match['head']}{int(match['number']) + expert_rank * local[match['head']]}"
        f"{match['tail']}"
        if match
        else name
        for name, match in matches.items()
    }
