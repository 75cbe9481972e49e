"""Momentum that ZeRO 1 and 2 keep by whole parameters and not by partition: that of Muon.

A rank keeps the momentum of each parameter of which its partition holds an element, whole, one
after the other (DeepSpeed 0.17 to 0.19, ``stage_1_and_2.py``, ``_muon_momentum_buffer``). Of a
parameter that lies in two partitions, both ranks keep it. An offloaded optimizer's lies in
partitions, as all other states do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ckptool.formats._deepspeed_flat import Run, Shapes
from ckptool.formats._deepspeed_read import Vector
from ckptool.formats._deepspeed_slots import Slot

Touched = Mapping[int, Sequence[str]]
"""For each partition the parameters that it holds elements of, in order."""


def touched_by(runs: Sequence[Run], parts: int) -> Touched:
    """Which parameters each of a group's partitions holds elements of."""
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
    """The runs of a vector that holds these parameters whole."""
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
