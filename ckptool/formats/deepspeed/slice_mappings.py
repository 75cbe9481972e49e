"""Groups of ZeRO 1 and 2 that the model file does not list: from the partitions' own mappings.

Beside experts DeepSpeed saves ``param_shapes`` only since 0.19. Each rank's optimizer says where
in its partition of a group each parameter lies (``param_slice_mappings``); shapes are those of the
weights. Under round-robin gradients these places are of another order than the partitions'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.errors import Refusal
from ckptool.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ckptool.formats.deepspeed.experts import read_experts
from ckptool.formats.deepspeed.flat_runs import Shapes
from ckptool.formats.deepspeed.states import State
from ckptool.formats.deepspeed.zero_partitions import (
    is_set,
    read_groups,
    read_partition_counts,
    select_members,
)
from ckptool.serialization.archive.tensors import read_natural
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.state_dict.leaves import Barred

_KEY = "param_slice_mappings"
_Slices = Mapping[str, tuple[int, int]]
"""Where a partition has parameters of a group: the first element of each, and their number."""


def read_mapped_groups(checkpoint: DeepSpeedCheckpoint, mp: int) -> list[Shapes]:
    """Return parameter shapes by name, one dict per group, in the order of the flat buffers.

    Those of experts have the numbers of the first rank's. Barred if the order is not recorded.
    """
    ranks = checkpoint.partitions(mp)
    first = ranks[0].state
    if is_set(checkpoint, mp, "zero_optimization", "round_robin_gradients"):
        raise _bar(first, "their order under round_robin_gradients is in no file")
    modules = (checkpoint.models[0, mp].inner("module"), *read_experts(checkpoint, mp).values())
    shapes = {name: vector.shape for module in modules for name, vector in module.tensors.items()}
    slices = read_groups(ranks, _read_slices)
    counts = read_partition_counts(first, len(slices[0]), len(ranks))
    data_first = is_set(checkpoint, mp, "use_data_before_expert_parallelism")
    groups = []
    for number, parts in enumerate(counts):
        members = select_members(len(ranks), parts, 0, data_first)
        if any(number >= len(slices[dp]) for dp in members):
            raise _bar(first, f"{_KEY} of ranks have several numbers of groups")
        groups.append(_join(first, [slices[dp][number] for dp in members], shapes))
    return groups


def _read_slices(state: State) -> list[_Slices]:
    if not state.get(_KEY):
        raise _bar(state, f"there are no param_shapes, and no {_KEY}")
    mappings = state.sequence(_KEY)
    return [{str(name): _read_place(state, at) for name, at in dict(m).items()} for m in mappings]


def _read_place(state: State, address: Any) -> tuple[int, int]:
    fields = address.fields if isinstance(address, Call) else {}
    if not fields.keys() >= {"start", "numel"}:
        raise _bar(state, f"{_KEY} hold no places")
    return read_natural(fields["start"]), read_natural(fields["numel"])


def _join(state: State, parts: Sequence[_Slices], shapes: Shapes) -> Shapes:
    """Return a group's parameters, which fill its partitions one after the other, with shapes."""
    sizes: dict[str, int] = {}
    for part in parts:
        end, last = 0, next(reversed(sizes), None)
        for name, (start, numel) in part.items():
            if start != end:
                raise _bar(state, f"{name} begins at {start:,} of a partition, not at {end:,}")
            if name in sizes and (end or name != last):
                raise _bar(state, f"{name} goes on at {end:,} of a partition, not where one ends")
            sizes[name] = sizes.get(name, 0) + numel
            end += numel
    for name, size in sizes.items():
        if name not in shapes or math.prod(shapes[name]) != size:
            stored = list(shapes[name]) if name in shapes else "no weights"
            raise _bar(state, f"{_KEY} have {size:,} elements of {name}, which has {stored}")
    return {name: shapes[name] for name in sizes}


def _bar(state: State, why: str) -> Barred:
    message = f"{state.file.what}: which parameters are in it is not known: {why}"
    return Barred(Refusal(message, "sharding-unknown", file=state.file.what))
