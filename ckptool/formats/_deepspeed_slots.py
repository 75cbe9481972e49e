"""What a rank keeps of one flat group of DeepSpeed's ZeRO optimizers: the same for all stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.errors import Damaged, Problem, Refusal
from ckptool.formats._deepspeed_doubles import require_distinct
from ckptool.formats._deepspeed_flat import Run, Shapes, run_chunks
from ckptool.formats._deepspeed_local import MASTER, Holding
from ckptool.formats._deepspeed_read import State, Vector
from ckptool.formats._refusing import refusal_in

STATES = frozenset(
    "fp32 exp_avg exp_avg_sq step max_exp_avg_sq exp_inf momentum_buffer sum square_avg grad_avg"
    " acc_delta worker_error server_error".split()
)
"""What DeepSpeed's and torch's optimizers call the state of a parameter."""


@dataclass(slots=True)
class Slot:
    """What one rank keeps of one flat group: partitions by kind, and values of the whole group.

    ``refused`` says of the kinds that cannot be read, or must not be, why.
    """

    flat: dict[str, Vector] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)


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
        why, found = refusal_in(value), state.vector(value)
        if why is not None:
            slot.refused[kind] = why
        elif found is not None and found.is_flat and least <= found.shape[0] <= least + padding:
            slot.flat[kind] = found
        elif (found is not None and found.shape == ()) or isinstance(value, int | float):
            slot.scalars[kind] = found or value
        else:
            slot.other[kind] = found or value
    return slot


def refuse_kinds(found: Holding, slots: Sequence[Slot], names: Iterable[str], rank: int) -> None:
    """Refuse the state of these parameters that some slot cannot read, and others hold of them.

    It is taken out of all slots. What no optimizer keeps of a parameter, as far as is known, and no
    slot does, has no name but its own.
    """
    refused = {kind: why for slot in slots for kind, why in slot.refused.items()}
    for kind, why in refused.items():
        if kind in STATES or any(kind in slot.flat or kind in slot.scalars for slot in slots):
            for name in names:
                found.add_leaf((kind, name), why, rank)
        for slot in slots:
            slot.flat.pop(kind, None)
            slot.scalars.pop(kind, None)


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
