"""Masters and moments of ZeRO 1, 2 and 3: named tensors out of flat partitions.

DeepSpeed 0.4 to 0.19. ``param_slice_mappings`` are not looked at: under round-robin gradients they
tell the offsets of another order than the one the partitions have. ``param_shapes`` are right.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ckptool.errors import Damaged
from ckptool.formats._deepspeed_doubles import require_distinct
from ckptool.formats._deepspeed_flat import Run, Shapes, flat_runs, run_chunks, split_runs
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_read import State, Vector
from ckptool.formats._storage import natural

MASTER = "fp32"
_ANY = 1 << 62
_EXPERT = re.compile(r"(?P<head>.*\bdeepspeed_experts\.)(?P<number>\d+)(?P<tail>\..*)")


@dataclass(slots=True)
class Slot:
    """What one rank keeps of one flat group: partitions by kind, and values of the whole group."""

    flat: dict[str, Vector] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Partition:
    """A rank's optimizer file, its number among the data-parallel ranks, and its global rank."""

    state: State
    dp: int
    rank: int


def _require_distinct(ranks: Sequence[Partition], slots: Sequence[Sequence[Slot]]) -> None:
    held = []
    for rank, own in zip(ranks, slots, strict=True):
        masters = [slot.flat[MASTER] for slot in own]
        states = [v for slot in own for kind, v in slot.flat.items() if kind != MASTER]
        held.append((rank.state.file.what, masters, states))
    require_distinct(held)


def _slot(state: State, master: Any, kept: Mapping[str, Any], padding: int) -> Slot:
    """The master and the optimizer's state of one group; what is as long as it, is flat as well.

    ``padding`` is how many elements longer than the master a state may be.
    """
    vector = state.vector(master)
    if vector is None or not vector.is_flat:
        raise Damaged(f"{state.file.what}: a flat group of masters is no flat tensor")
    slot, least = Slot({MASTER: vector}), vector.shape[0]
    for kind, value in kept.items():
        found = state.vector(value)
        if found is not None and found.is_flat and least <= found.shape[0] <= least + padding:
            slot.flat[kind] = found
        elif (found is not None and found.shape == ()) or isinstance(value, int | float):
            slot.scalars[kind] = found or value
        else:
            slot.other[kind] = found or value
    return slot


# ZeRO 1 and 2


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
        raise Damaged(f"{ranks[0].state.file.what}: {counts} flat groups, {len(groups)} of names")
    _require_distinct(ranks, slots)
    counts = _partition_counts(ranks[0].state, len(groups), len(ranks))
    paddings = _paddings(ranks[0].state, groups)
    for number, shapes in enumerate(groups):
        held = [slot[number] for slot in slots]
        parts = counts[number]
        for expert_rank in range(len(ranks) // parts):
            chosen = _members(len(ranks), parts, expert_rank, data_first)
            members = [(ranks[dp], held[dp]) for dp in chosen]
            names = _global_names(shapes, expert_rank)
            _add_group(found, members, shapes, names, paddings[number])
        _add_other(found, ranks, held, number)


def _group_names(state: State) -> list[tuple[Any, int]]:
    """The names of the optimizer's groups, as groups of experts have them, each with its count."""
    base = state.fields.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, dict) else None
    names = [group.get("name") for group in groups or [] if isinstance(group, dict)]
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
    stored = state.fields.get("partition_count")
    counts = list(map(natural, stored if isinstance(stored, list | tuple) else [stored] * groups))
    if len(counts) != groups or any(not count or ranks % count for count in counts):
        raise Damaged(
            f"{state.file.what}: partition_count {counts} for {groups} groups and {ranks} ranks"
        )
    return counts


def _paddings(state: State, groups: Sequence[Shapes]) -> list[list[int]]:
    """The elements left free after each parameter, by group (since 0.19.8; none before)."""
    if not state.fields.get("param_alignment_paddings"):
        return [[0] * len(group) for group in groups]
    stored = [list(map(natural, group)) for group in state.sequence("param_alignment_paddings")]
    if list(map(len, stored)) != list(map(len, groups)):
        raise Damaged(f"{state.file.what}: param_alignment_paddings do not fit param_shapes")
    return stored


def _slots_of(state: State) -> list[Slot]:
    """The groups of one rank's file.

    Masters are stored without the padding at their end, moments with it; an elastic checkpoint
    stores both without, as a list of dicts. Versions before 0.16 tell all padding as the last
    rank's, 0.5 does not tell it.
    """
    masters = state.sequence("single_partition_of_fp32_groups")
    paddings = list(map(natural, state.fields.get("group_paddings") or [_ANY] * len(masters)))
    kept = _kept_states(state, len(masters))
    slots = []
    for master, padding, values in zip(masters, paddings, kept, strict=False):
        slots.append(_slot(state, master, values, padding))
    return slots


def _kept_states(state: State, groups: int) -> list[Mapping[str, Any]]:
    base = state.fields.get("base_optimizer_state")
    if isinstance(base, list):
        kept = [value if isinstance(value, dict) else {} for value in base]
        return [*kept, *[{}] * (groups - len(kept))]
    inner = state.inner("base_optimizer_state")
    by_index = inner.mapping("state")
    indices = _indices(inner, groups)
    return [value if isinstance(value := by_index.get(i), dict) else {} for i in indices]


def _indices(base: State, groups: int) -> list[Any]:
    """The index that the optimizer's state gives to each group's one flat parameter."""
    found: list[Any] = list(range(groups))
    for number, group in enumerate(base.fields.get("param_groups") or []):
        params = group.get("params") if isinstance(group, dict) else None
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
    kinds = dict.fromkeys(kind for _, slot in members for kind in slot.flat)
    size = max(vector.shape[0] for _, slot in members for vector in slot.flat.values())
    runs = list(flat_runs(shapes, paddings, size, len(members)))
    for kind in kinds:
        for name, shape in shapes.items():
            found.add((kind, names[name]), _dtype(members, kind), shape, [])
        for run in runs:
            partition, slot = members[run.part]
            _add_run(found, partition, slot.flat.get(kind), kind, run, shapes, names[run.name])
    for partition, slot in members:
        for kind, value in slot.scalars.items():
            for name in names.values():
                found.add_leaf((kind, name), value, partition.rank)


def _dtype(members: Sequence[tuple[Partition, Slot]], kind: str) -> Any:
    return next(slot.flat[kind].dtype for _, slot in members if kind in slot.flat)


def _add_run(
    found: Holding,
    partition: Partition,
    vector: Vector | None,
    kind: str,
    run: Run,
    shapes: Shapes,
    name: str,
) -> None:
    held = vector.shape[0] if vector else 0
    if vector is None or run.at + run.stop - run.start > held:
        raise Damaged(
            f"{partition.state.file.what}: {kind}.{name} needs elements {run.at:,} to"
            f" {run.at + run.stop - run.start:,} of a partition that holds {held:,}"
        )
    shape = shapes[run.name]
    chunks = run_chunks(run, shape, vector.at, vector.dtype.itemsize, partition.rank)
    found.add((kind, name), vector.dtype, shape, chunks)


def _add_other(
    found: Holding, ranks: Sequence[Partition], held: Sequence[Slot], number: int
) -> None:
    """Keep what is neither flat nor a scalar for each rank, under the optimizer's own names."""
    for partition, slot in zip(ranks, held, strict=True):
        for kind, value in slot.other.items():
            found.add_leaf(("optimizer", "state", number, kind), value, partition.rank)


def _global_names(shapes: Shapes, expert_rank: int) -> dict[str, str]:
    """The names with global expert numbers; the group's own count experts from zero on each rank.

    DeepSpeed numbers experts by expert-parallel rank, then by their number on the rank.
    """
    matches = {name: _EXPERT.fullmatch(name) for name in shapes}
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


# ZeRO 3


def add_split_groups(found: Holding, ranks: Sequence[Partition], groups: Sequence[Shapes]) -> None:
    """Add the tensors of ZeRO 3."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for partition in ranks:
        _require_plain_split(partition.state, len(groups))
    held = [_sub_groups(partition.state) for partition in ranks]
    _require_distinct(ranks, held)
    for partition, slots in zip(ranks, held, strict=True):
        sizes = [slot.flat[MASTER].shape[0] for slot in slots]
        starts = [0, *accumulate(sizes)]
        for run in split_runs(shapes, sizes, partition.dp, len(ranks)):
            number = bisect_right(starts, run.at) - 1
            here = Run(run.name, run.start, run.stop, run.part, run.at - starts[number])
            for kind, vector in slots[number].flat.items():
                _add_run(found, partition, vector, kind, here, shapes, run.name)
            for kind, value in slots[number].scalars.items():
                found.add_leaf((kind, run.name), value, partition.rank)
        for number, slot in enumerate(slots):
            _add_other(found, [partition], [slot], number)


def _require_plain_split(state: State, groups: int) -> None:
    param_groups = state.inner("optimizer_state_dict").fields.get("param_groups") or []
    if len(param_groups) > groups:
        raise Damaged(
            f"{state.file.what}: {len(param_groups)} groups of parameters, whose order DeepSpeed"
            " did not save before 0.5.4"
        )
    if state.fields.get("ds_zero_partition_groups"):
        raise Damaged(
            f"{state.file.what}: ZeRO 3 with automatic expert parallelism cuts experts among groups"
            " of ranks of their own; ckptool does not read that",
            hint="deepspeed's ds_to_universal.py makes a universal checkpoint of it",
        )


def _sub_groups(state: State) -> list[Slot]:
    masters = state.sequence("fp32_flat_groups")
    kept = state.inner("optimizer_state_dict").mapping("state")
    slots = []
    for number, master in enumerate(masters):
        values = kept.get(number)
        slots.append(_slot(state, master, values if isinstance(values, dict) else {}, 0))
    return slots
