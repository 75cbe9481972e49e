"""What a rank keeps of one flat group of DeepSpeed's ZeRO optimizers: the same for all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_doubles import require_distinct
from ckptool.formats._deepspeed_flat import Run, Shapes, run_chunks
from ckptool.formats._deepspeed_local import Holding
from ckptool.formats._deepspeed_read import State, Vector

MASTER = "fp32"


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


def require_distinct_ranks(ranks: Sequence[Partition], slots: Sequence[Sequence[Slot]]) -> None:
    """Damaged where a rank's file is a copy of another rank's; ``slots`` are those of each rank."""
    held = []
    for rank, own in zip(ranks, slots, strict=True):
        masters = [slot.flat[MASTER] for slot in own]
        states = [v for slot in own for kind, v in slot.flat.items() if kind != MASTER]
        held.append((rank.state.file.what, masters, states))
    require_distinct(held)


def slot_of(state: State, master: Any, kept: Mapping[str, Any], padding: int) -> Slot:
    """The master and the optimizer's state of one group; what is as long as it, is flat as well.

    ``padding`` is how many elements longer than the master a state may be.
    """
    vector = state.vector(master)
    if vector is None or not vector.is_flat:
        raise Damaged(
            Problem(
                f"{state.file.what}: a flat group of masters is no flat tensor", "tensor-record"
            )
        )
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


def add_run(
    found: Holding,
    partition: Partition,
    vector: Vector | None,
    kind: str,
    run: Run,
    shapes: Shapes,
    name: str,
) -> None:
    """Add what one partition holds of a parameter; Damaged where it is shorter than that."""
    held = vector.shape[0] if vector else 0
    if vector is None or run.at + run.stop - run.start > held:
        raise Damaged(
            Problem(
                f"{partition.state.file.what}: {kind}.{name} needs elements {run.at:,} to"
                f" {run.at + run.stop - run.start:,} of a partition that holds {held:,}",
                "storage-mismatch",
            )
        )
    shape = shapes[run.name]
    chunks = run_chunks(run, shape, vector.at, vector.dtype.itemsize, partition.rank)
    found.add((kind, name), vector.dtype, shape, chunks)


def add_other(
    found: Holding, ranks: Sequence[Partition], held: Sequence[Slot], number: int
) -> None:
    """Keep what is neither flat nor a scalar for each rank, under the optimizer's own names."""
    for partition, slot in zip(ranks, held, strict=True):
        for kind, value in slot.other.items():
            path = ("optimizer", "state", number, kind)
            found.add_leaf(path, value, partition.rank, rank_state=True)
