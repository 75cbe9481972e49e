"""Masters and moments of ZeRO, stages 1 to 3: named tensors from the ranks' partitions.

ZeRO 1 and 2 (``runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``) concatenate the parameters
of a group, pad the end, and cut the whole into one partition per rank. ZeRO 3 (``stage3.py``) cuts
each parameter by itself: rank r holds elements r * s to (r + 1) * s, where s is its size divided by
the ranks, rounded up (DeepSpeed 0.4 to 0.19).

``param_slice_mappings`` are ignored: under round-robin gradients they have the offsets of another
order than the partitions'. ``param_shapes`` are right.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from ckptool.errors import Damaged, naming
from ckptool.formats.deepspeed.checkpoint import DeepSpeedCheckpoint, RankState
from ckptool.formats.deepspeed.experts import EXPERT
from ckptool.formats.deepspeed.flat_runs import (
    MASTER,
    FlatRun,
    FlatSlot,
    RankContents,
    Shapes,
    add_other,
    add_partition_run,
    cut_evenly,
    is_flat,
    keep_own_scalars,
    read_flat_slot,
    refuse_kinds,
    require_distinct_ranks,
)
from ckptool.formats.deepspeed.states import State, require_shallow_dict
from ckptool.serialization.archive.tensors import read_natural
from ckptool.serialization.state_dict.leaves import PlainLeaf

_ANY = 1 << 62
_Member = tuple[RankState, FlatSlot]
_Each = TypeVar("_Each")


def add_flat_groups(
    contents: RankContents, checkpoint: DeepSpeedCheckpoint, mp: int, groups: Sequence[Shapes]
) -> None:
    """Add the tensors of ZeRO 1, ZeRO 2 or BF16_Optimizer.

    A group of experts has fewer partitions than there are ranks; if data parallelism comes before
    expert parallelism, the ranks of one expert are consecutive.
    """
    ranks = checkpoint.partitions(mp)
    data_first = is_set(checkpoint, mp, "use_data_before_expert_parallelism")
    first = ranks[0].state
    slots = read_groups(ranks, _read_flat_slots)
    if any(len(rank_slots) != len(groups) for rank_slots in slots):
        sizes = sorted({len(rank_slots) for rank_slots in slots})
        raise Damaged(
            f"{first.file.what}: {sizes} flat groups, but {len(groups)} in param_shapes",
            "tensor-record",
        )
    require_distinct_ranks(ranks, slots)
    with naming(first.file.what):
        counts = read_partition_counts(first, len(groups), len(ranks))
        paddings = _read_paddings(first, groups)
    for number, shapes in enumerate(groups):
        group = [rank_slots[number] for rank_slots in slots]
        parts = counts[number]
        experts = [_name_globally(shapes, rank) for rank in range(len(ranks) // parts)]
        global_names = [name for names in experts for name in names.values()]
        refuse_kinds(contents, group, global_names, ranks[0].rank)
        for expert_rank, names in enumerate(experts):
            chosen = select_members(len(ranks), parts, expert_rank, data_first)
            members = [(ranks[dp], group[dp]) for dp in chosen]
            keep_own_scalars(checkpoint.source, [slot for _, slot in members])
            _add_group(contents, members, shapes, names, paddings[number])
        add_other(contents, checkpoint.source, ranks, group, number)


def is_set(checkpoint: DeepSpeedCheckpoint, mp: int, *path: str) -> bool:
    """Return whether a setting is on, which beside experts the optimizer's files alone may have."""
    *sections, key = path
    for state in (checkpoint.models[0, mp], checkpoint.optimizers[0, mp]):
        settings = state.inner("ds_config")
        for section in sections:
            settings = settings.inner(section)
        if settings.get(key) is True:
            return True
    return False


def read_groups(
    ranks: Sequence[RankState], read: Callable[[State], list[_Each]]
) -> list[list[_Each]]:
    """Return what the state of each rank has of the groups, in the first one's order.

    DeepSpeed sorts those of experts by random hashes.
    """
    order = _list_group_names(ranks[0].state)
    by_rank = []
    for rank in ranks:
        with naming(rank.state.file.what):
            groups, names = read(rank.state), _list_group_names(rank.state)
        is_known = len(order) == len(groups) and set(names) == set(order)
        by_rank.append([groups[names.index(name)] for name in order] if is_known else groups)
    return by_rank


def _list_group_names(state: State) -> list[tuple[Any, int]]:
    """Return each group's name, which only those of experts have, and how many had it before."""
    if not isinstance(state.stored.get("base_optimizer_state"), dict):
        return []
    names = [group.get("name") for group in state.inner("base_optimizer_state").groups()]
    return [(name, names[:at].count(name)) for at, name in enumerate(names)]


def select_members(ranks: int, parts: int, expert_rank: int, data_first: bool) -> list[int]:
    """Return the data-parallel ranks of one expert-parallel rank's partitions, in order."""
    experts = ranks // parts
    first, step = (expert_rank * parts, 1) if data_first else (expert_rank, experts)
    return [first + step * part for part in range(parts)]


def read_partition_counts(state: State, groups: int, ranks: int) -> list[int]:
    """Return into how many partitions each group is cut: those of experts, into fewer."""
    stored = state.get("partition_count")
    counts = list(
        map(read_natural, stored if isinstance(stored, list | tuple) else [stored] * groups)
    )
    if len(counts) != groups or any(not count or ranks % count for count in counts):
        raise Damaged(
            f"{state.file.what}: partition_count {counts} for {groups} groups and {ranks} ranks",
            "tensor-record",
        )
    return counts


def _read_paddings(state: State, groups: Sequence[Shapes]) -> list[list[int]]:
    """Read the elements left free after each parameter, by group (since 0.19.8; none before)."""
    if not state.get("param_alignment_paddings"):
        return [[0] * len(group) for group in groups]
    stored = [
        list(map(read_natural, group)) for group in state.sequence("param_alignment_paddings")
    ]
    if list(map(len, stored)) != list(map(len, groups)):
        raise Damaged(
            f"{state.file.what}: param_alignment_paddings do not match param_shapes",
            "tensor-record",
        )
    return stored


def _read_flat_slots(state: State) -> list[FlatSlot]:
    """Return the groups of one rank's file.

    Masters are stored without the padding at their end, moments with it; an elastic checkpoint
    stores both without, as a list of dicts. Versions before 0.16 record all padding as the last
    rank's, 0.5 does not record it.
    """
    masters = state.sequence("single_partition_of_fp32_groups")
    paddings = list(map(read_natural, state.get("group_paddings") or [_ANY] * len(masters)))
    states = _group_states(state, len(masters))
    groups = zip(masters, paddings, states, strict=False)
    return [read_flat_slot(state, master, values, padding) for master, padding, values in groups]


def _group_states(state: State, groups: int) -> list[Mapping[Any, Any]]:
    """Return the optimizer's state of each group, whose one parameter is the flat partition."""
    base = state.fields.get("base_optimizer_state")
    if isinstance(base, list):
        return [*map(require_shallow_dict, base), *[{}] * (groups - len(base))]
    inner = state.inner("base_optimizer_state")
    indices: list[Any] = list(range(groups))
    for number, group in enumerate(inner.groups()):
        params = group.get("params")
        if number < groups and isinstance(params, list) and params:
            indices[number] = params[0]
    by_index = inner.inner("state").fields
    return [require_shallow_dict(by_index.get(index)) for index in indices]


def _name_globally(shapes: Shapes, expert_rank: int) -> dict[str, str]:
    """Return names with global expert numbers: DeepSpeed counts by expert-parallel rank first."""
    matches = {name: EXPERT.fullmatch(name) for name in shapes}
    experts: dict[str, int] = {}
    for match in filter(None, matches.values()):
        experts[match["head"]] = max(experts.get(match["head"], 0), int(match["number"]) + 1)
    names = {}
    for name, expert in matches.items():
        if expert:
            number = int(expert["number"]) + expert_rank * experts[expert["head"]]
            names[name] = f"{expert['head']}{number}{expert['tail']}"
        else:
            names[name] = name
    return names


def _add_group(
    contents: RankContents,
    members: Sequence[_Member],
    shapes: Shapes,
    names: Mapping[str, str],
    paddings: Sequence[int],
) -> None:
    size = max(vector.shape[0] for _, slot in members for vector in slot.flat.values())
    runs = list(place_flat_runs(shapes, paddings, size, len(members)))
    _add_whole_states(contents, members, runs, shapes, names)
    dtypes = {k: v.dtype for _, slot in reversed(members) for k, v in slot.flat.items()}
    for kind in dict.fromkeys(kind for _, slot in members for kind in slot.flat):
        for name, shape in shapes.items():
            contents.add((kind, names[name]), dtypes[kind], shape, [])
        for run in runs:
            partition, slot = members[run.part]
            target, shape = (kind, names[run.name]), shapes[run.name]
            add_partition_run(contents, partition, slot.flat.get(kind), target, run, shape)
    for partition, slot in members:
        for kind, value in slot.scalars.items():
            for name in names.values():
                contents.add_leaf((kind, name), value, partition.rank)


def place_flat_runs(
    shapes: Shapes, paddings: Sequence[int], size: int, parts: int
) -> Iterator[FlatRun]:
    """Yield the runs of a flat group that is cut into ``parts`` partitions of ``size``.

    ``paddings`` are the elements left free after each parameter. Raises Damaged if the group does
    not fill its partitions up to the alignment, which is less than two elements per partition.
    """
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        for part in range(offset // size, -(-(offset + numel) // size)) if size else ():
            lo, hi = max(offset, part * size), min(offset + numel, (part + 1) * size)
            if lo < hi:
                yield FlatRun(name, lo - offset, hi - offset, part, lo - part * size)
        offset += numel + padding
    if not 0 <= size * parts - offset < max(2 * parts, 1):
        raise Damaged(
            f"{len(shapes):,} parameters of {offset:,} elements do not fit {parts:,} partitions"
            f" of {size:,} elements",
            "storage-mismatch",
        )


def _add_whole_states(
    contents: RankContents,
    members: Sequence[_Member],
    runs: Sequence[FlatRun],
    shapes: Shapes,
    names: Mapping[str, str],
) -> None:
    """Add, and remove from the slots, state that is kept by whole parameter: the momentum of Muon.

    A rank keeps that of each parameter of which its partition contains an element, one after the
    other (DeepSpeed 0.17 to 0.19, ``stage_1_and_2.py``, ``_muon_momentum_buffer``); of a parameter
    in two partitions, both ranks keep it. An offloaded optimizer's is in partitions. Lengths
    decide: those of all ranks must be the sums of their parameters', and one must be longer than
    its partition's part of them.
    """
    whole_runs = [_place_whole_runs(runs, shapes, part) for part in range(len(members))]
    lengths = [own_runs[-1].at + own_runs[-1].stop if own_runs else 0 for own_runs in whole_runs]
    slots = [slot for _, slot in members]
    for kind in dict.fromkeys(kind for slot in slots for kind in (*slot.flat, *slot.other)):
        vectors = [_find_flat_vector(slot, kind) for slot in slots]
        if [vector.shape[0] if vector else 0 for vector in vectors] != lengths:
            continue
        if not any(kind in slot.other for slot in slots):
            continue
        for slot in slots:
            slot.flat.pop(kind, None)
            slot.other.pop(kind, None)
        for (partition, _), vector, own_runs in zip(members, vectors, whole_runs, strict=True):
            for run in own_runs:
                target, shape = (kind, names[run.name]), shapes[run.name]
                add_partition_run(contents, partition, vector, target, run, shape)


def _place_whole_runs(runs: Sequence[FlatRun], shapes: Shapes, part: int) -> list[FlatRun]:
    """Return the runs of a vector with each parameter, complete, of which a partition has some."""
    whole_runs, at = [], 0
    for name in [run.name for run in runs if run.part == part]:
        numel = math.prod(shapes[name])
        whole_runs.append(FlatRun(name, 0, numel, part, at))
        at += numel
    return whole_runs


def _find_flat_vector(slot: FlatSlot, kind: str) -> PlainLeaf | None:
    value = slot.flat.get(kind) or slot.other.get(kind)
    return value if isinstance(value, PlainLeaf) and is_flat(value) else None


def add_split_groups(
    contents: RankContents, checkpoint: DeepSpeedCheckpoint, mp: int, groups: Sequence[Shapes]
) -> None:
    """Add the tensors of ZeRO 3; none if it has no ranks, as in a universal checkpoint."""
    ranks = checkpoint.partitions(mp)
    if not ranks:
        return
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for partition in ranks:
        _require_plain_split(partition.state, len(groups))
    slots = [_read_sub_slots(partition.state) for partition in ranks]
    require_distinct_ranks(ranks, slots)
    refuse_kinds(contents, [slot for of_rank in slots for slot in of_rank], shapes, ranks[0].rank)
    for of_ranks in zip(*slots, strict=False):
        keep_own_scalars(checkpoint.source, of_ranks)
    for partition, rank_slots in zip(ranks, slots, strict=True):
        sizes = [slot.flat[MASTER].shape[0] for slot in rank_slots]
        for run in place_split_runs(shapes, sizes, partition.dp, len(ranks)):
            for kind, vector in rank_slots[run.part].flat.items():
                target, shape = (kind, run.name), shapes[run.name]
                add_partition_run(contents, partition, vector, target, run, shape)
            for kind, value in rank_slots[run.part].scalars.items():
                contents.add_leaf((kind, run.name), value, partition.rank)
        for number, slot in enumerate(rank_slots):
            add_other(contents, checkpoint.source, [partition], [slot], number)


def place_split_runs(
    shapes: Shapes, sizes: Sequence[int], rank: int, ranks: int
) -> Iterator[FlatRun]:
    """Yield the runs of one rank if each parameter was cut by itself into ``ranks`` pieces.

    Their parts are the rank's sub groups, whose elements are ``sizes``. Raises Damaged if the
    pieces do not fill the sub groups exactly.
    """
    starts = [0, *accumulate(sizes)]
    offset = 0
    for name, shape in shapes.items():
        number = bisect_right(starts, offset) - 1
        start, stop = cut_evenly(shape, rank, ranks)
        if start < stop and number < len(sizes):
            yield FlatRun(name, start, stop, number, offset - starts[number])
        piece = -(-math.prod(shape) // ranks)
        offset += piece
        if number < len(sizes) and offset > starts[number + 1]:
            raise Damaged(
                f"{name}: its piece of {piece:,} elements crosses the end of a sub group",
                "storage-mismatch",
            )
    if offset != sum(sizes):
        raise Damaged(
            f"{len(shapes):,} parameters take {offset:,} elements of rank {rank}'s sub groups,"
            f" which hold {sum(sizes):,}",
            "storage-mismatch",
        )


def _require_plain_split(state: State, groups: int) -> None:
    state.get("partition_count")  # raises Barred where it is refused
    stated = state.inner("optimizer_state_dict").groups()
    if len(stated) > groups:
        raise Damaged(
            f"{state.file.what}: {len(stated)} groups of parameters, whose order"
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


def _read_sub_slots(state: State) -> list[FlatSlot]:
    masters = enumerate(state.sequence("fp32_flat_groups"))
    values = state.inner("optimizer_state_dict").inner("state").fields
    return [
        read_flat_slot(state, m, require_shallow_dict(values.get(number)), 0)
        for number, m in masters
    ]
