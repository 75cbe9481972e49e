"""Masters and moments of ZeRO 3: named tensors out of sub groups, each parameter cut by itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_flat import Run, Shapes, split_runs
from ckptool.formats._deepspeed_local import MASTER, Holding
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


def add_split_groups(found: Holding, ranks: Sequence[Partition], groups: Sequence[Shapes]) -> None:
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
            Problem(
                f"{state.file.what}: {len(param_groups)} groups of parameters, whose order"
                " DeepSpeed did not save before 0.5.4",
                "sharding-unknown",
            )
        )
    if state.get("ds_zero_partition_groups"):
        raise Damaged(
            Problem(
                f"{state.file.what}: ZeRO 3 with automatic expert parallelism cuts experts among"
                " groups of ranks of their own; ckptool does not read that",
                "sharding-unknown",
            ),
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
