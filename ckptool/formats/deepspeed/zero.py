"""Masters and moments of ZeRO, stages 1 to 3: named tensors out of partitions.

Masters and moments of ZeRO 1 and 2: named tensors out of flat partitions.

DeepSpeed 0.4 to 0.19. ``param_slice_mappings`` are not looked at: under round-robin gradients they
tell the offsets of another order than the one the partitions have. ``param_shapes`` are right.

Momentum that ZeRO 1 and 2 keep by whole parameters and not by partition: that of Muon.

A rank keeps the momentum of each parameter of which its partition holds an element, whole, one
after the other (DeepSpeed 0.17 to 0.19, ``stage_1_and_2.py``, ``_muon_momentum_buffer``). Of a
parameter that lies in two partitions, both ranks keep it. An offloaded optimizer's lies in
partitions, as all other states do.

Masters and moments of ZeRO 3: named tensors out of sub groups, each parameter cut by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ckptool.errors import Damaged
from ckptool.formats.deepspeed.experts import EXPERT
from ckptool.formats.deepspeed.partitions import (
    MASTER,
    Partition,
    RankContents,
    Run,
    Shapes,
    Slot,
    add_other,
    add_run,
    flat_runs,
    refuse_kinds,
    require_distinct_ranks,
    slot_of,
    split_runs,
)
from ckptool.formats.deepspeed.states import State, Vector, require_shallow
from ckptool.serialization.archive.tensors import natural

_ANY = 1 << 62


def add_flat_groups(
    found: RankContents, ranks: Sequence[Partition], groups: Sequence[Shapes], *, data_first: bool
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
            f"{ranks[0].state.file.what}: {counts} flat groups, {len(groups)} of names",
            "tensor-record",
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
            f"{state.file.what}: partition_count {counts} for {groups} groups and {ranks} ranks",
            "tensor-record",
        )
    return counts


def _paddings(state: State, groups: Sequence[Shapes]) -> list[list[int]]:
    """Return the elements left free after each parameter, by group (since 0.19.8; none before)."""
    if not state.get("param_alignment_paddings"):
        return [[0] * len(group) for group in groups]
    stored = [list(map(natural, group)) for group in state.sequence("param_alignment_paddings")]
    if list(map(len, stored)) != list(map(len, groups)):
        raise Damaged(
            f"{state.file.what}: param_alignment_paddings do not fit param_shapes", "tensor-record"
        )
    return stored


def _slots_of(state: State) -> list[Slot]:
    """Return the groups of one rank's file.

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
    """Return the index that the optimizer's state gives to each group's one flat parameter."""
    found: list[Any] = list(range(groups))
    for number, group in enumerate(base.groups()):
        params = group.get("params")
        if number < groups and isinstance(params, list) and params:
            found[number] = params[0]
    return found


def _add_group(
    found: RankContents,
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
    found: RankContents,
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
    """Return the names with global expert numbers.

    The group's own count experts from zero on each rank.

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


Touched = Mapping[int, Sequence[str]]
"""For each partition the parameters that it holds elements of, in order."""


def touched_by(runs: Sequence[Run], parts: int) -> Touched:
    """Return which parameters each of a group's partitions holds elements of."""
    return {part: [run.name for run in runs if run.part == part] for part in range(parts)}


def whole_states(
    slots: Sequence[Slot], touched: Touched, shapes: Shapes
) -> Iterator[tuple[str, list[Vector | None]]]:
    """Take out of the slots the states that hold whole parameters, each with every rank's vector.

    Lengths tell: those of all ranks must be the sums of their parameters', and one of these must
    be longer than what its partition has of them.
    """
    wanted = [_total(touched[part], shapes) for part in range(len(slots))]
    for kind in dict.fromkeys(kind for slot in slots for kind in (*slot.flat, *slot.other)):
        held = [_vector(slot, kind) for slot in slots]
        if [vector.shape[0] if vector else 0 for vector in held] == wanted and any(
            kind in slot.other for slot in slots
        ):
            for slot in slots:
                slot.flat.pop(kind, None)
                slot.other.pop(kind, None)
            yield kind, held


def whole_runs(names: Sequence[str], shapes: Shapes, part: int) -> Iterator[Run]:
    """Yield the runs of a vector that holds these parameters whole."""
    at = 0
    for name in names:
        numel = math.prod(shapes[name])
        yield Run(name, 0, numel, part, at)
        at += numel


def _total(names: Sequence[str], shapes: Shapes) -> int:
    return sum(math.prod(shapes[name]) for name in names)


def _vector(slot: Slot, kind: str) -> Vector | None:
    found = slot.flat.get(kind) or slot.other.get(kind)
    return found if isinstance(found, Vector) and found.is_flat else None


def add_split_groups(
    found: RankContents, ranks: Sequence[Partition], groups: Sequence[Shapes]
) -> None:
    """Add the tensors of ZeRO 3; none where it has no ranks, as in a universal checkpoint."""
    if not ranks:
        return
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for partition in ranks:
        _require_plain_split(partition.state, len(groups))
    held = [_sub_groups(partition.state) for partition in ranks]
    require_distinct_ranks(ranks, held)
    refuse_kinds(found, [slot for slots in held for slot in slots], shapes, ranks[0].rank)
    for partition, slots in zip(ranks, held, strict=True):
        sizes = [slot.flat[MASTER].shape[0] for slot in slots]
        starts = [0, *accumulate(sizes)]
        for run in split_runs(shapes, sizes, partition.dp, len(ranks)):
            number = bisect_right(starts, run.at) - 1
            here = Run(run.name, run.start, run.stop, run.part, run.at - starts[number])
            for kind, vector in slots[number].flat.items():
                add_run(found, partition, vector, kind, here, shapes, run.name)
            for kind, value in slots[number].scalars.items():
                found.add_leaf((kind, run.name), value, partition.rank)
        for number, slot in enumerate(slots):
            add_other(found, [partition], [slot], number)


def _require_plain_split(state: State, groups: int) -> None:
    state.get("partition_count")
    param_groups = state.inner("optimizer_state_dict").groups()
    if len(param_groups) > groups:
        raise Damaged(
            f"{state.file.what}: {len(param_groups)} groups of parameters, whose order"
            " DeepSpeed did not save before 0.5.4",
            "sharding-unknown",
        )
    if state.get("ds_zero_partition_groups"):
        raise Damaged(
            f"{state.file.what}: ZeRO 3 with automatic expert parallelism cuts experts among"
            " groups of ranks of their own; ckptool does not read that",
            "sharding-unknown",
            hint="deepspeed's ds_to_universal.py makes a universal checkpoint of it",
        )


def _sub_groups(state: State) -> list[Slot]:
    masters = state.sequence("fp32_flat_groups")
    kept = state.inner("optimizer_state_dict").inner("state").fields
    slots = []
    for number, master in enumerate(masters):
        values = require_shallow(kept.get(number))
        slots.append(slot_of(state, master, values if isinstance(values, dict) else {}, 0))
    return slots
