"""``distrib_optim.pt``: the state of Megatron's distributed optimizer, gathered by rank 0.

One run of elements for each buffer, its buckets one after the other (``buckets_coalesced``), or one
tensor a bucket before (``get_parameter_state_dp_zero``, megatron-core 0.5 to 0.20; the optimizer
``dp_zero_gather_scatter`` of torch_dist is the same). A list holds one of these for each of several
optimizers: dense parameters first, then experts of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ckptool.core.catalog import Extent, Place
from ckptool.formats._megatron_buffers import Slot, gaps, slots_in_run
from ckptool.formats._megatron_names import is_expert
from ckptool.formats._megatron_params import Found, Held, Stored, runs_between
from ckptool.formats._megatron_state import Unnamed
from ckptool.formats._pickle import Global
from ckptool.formats._storage import StoredTensor, plain_tensor
from ckptool.formats.base import Source

MASTER = "param"
SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One saved buffer: its parameters' element type, and the runs of each kind of state."""

    dtype: str | None
    runs: dict[str, list[Stored]]

    @property
    def total(self) -> int:
        return max((run[-1].stop for run in self.runs.values()), default=0)


def saved_buffers(value: Any, place: Any) -> list[Buffer]:
    """The buffers of a gathered state, in order; ``place`` says where a tensor of it lies."""
    optimizers = value if isinstance(value, list) else [value]
    return [
        Buffer(param_dtype(dtypes), dict(_runs(state, place)))
        for optimizer in optimizers
        if isinstance(optimizer, dict)
        for number, by_dtype in optimizer.items()
        if type(number) is int and isinstance(by_dtype, dict)
        for dtypes, state in by_dtype.items()
    ]


def param_dtype(dtypes: Any) -> str | None:
    """The parameters' element type, of a buffer's key (parameters' and gradients' type)."""
    first = dtypes[0] if isinstance(dtypes, tuple) and len(dtypes) == 2 else None
    return first.name if isinstance(first, Global) else None


def _runs(state: Any, place: Any) -> Iterator[tuple[str, list[Stored]]]:
    for kind, value in state.items() if isinstance(state, dict) else ():
        tensors = [plain_tensor(item) for item in (value if isinstance(value, list) else [value])]
        if tensors and all(tensor is not None and len(tensor.shape) == 1 for tensor in tensors):
            yield str(kind), list(_consecutive([t for t in tensors if t], place))


def _consecutive(tensors: Sequence[StoredTensor], place: Any) -> Iterator[Stored]:
    start = 0
    for tensor in tensors:
        at: Place = place(tensor)
        yield Stored(tensor.shape, tensor.dtype, at, start)
        start += tensor.shape[0]


def expected_buffers(runs: Sequence[Sequence[Held]], expert_parallel: bool) -> list[list[Held]]:
    """The parameters of each buffer, in the order of the buffers.

    ``runs`` are a rank's parameters by virtual pipeline stage. Experts of several ranks have their
    buffers after all others.
    """
    buffers: list[list[Held]] = []
    for experts in (False, True) if expert_parallel else (False,):
        for held in runs:
            by_dtype: dict[str, list[Held]] = {}
            for one in held:
                if (expert_parallel and is_expert(one.name)) == experts:
                    by_dtype.setdefault(one.dtype.name, []).append(one)
            buffers += by_dtype.values()
    return buffers


def gathered_state(
    source: Source, saved: Sequence[Buffer], expected: Sequence[Sequence[Held]], tied: bool
) -> Found:
    """What the buffers hold of each parameter. Raises Unnamed where they do not fit the model.

    Where parameters fit in several ways, the one whose padding is zero is taken: that padding is
    all that is read of a tensor here.
    """
    if len(saved) != len(expected):
        raise Unnamed(f"{len(saved)} buffers, where the model has {len(expected)}")
    found: Found = {}
    for buffer, held in zip(saved, expected, strict=True):
        for one, slot in zip(held, _slots(source, buffer, held, tied), strict=True):
            for kind, runs in buffer.runs.items():
                name = "fp32" if kind == MASTER else kind
                cut = runs_between(runs, slot.start, slot.stop)
                found.setdefault((name, one.name), []).append((one, cut))
    return found


def _slots(source: Source, buffer: Buffer, held: Sequence[Held], tied: bool) -> list[Slot]:
    if {run[-1].stop for run in buffer.runs.values()} != {buffer.total}:
        raise Unnamed("its states are of different lengths")
    if buffer.dtype not in (None, held[0].dtype.name):
        raise Unnamed(f"a buffer of {buffer.dtype}, where the model has {held[0].dtype}")
    numels = [one.numel for one in held]
    shared = _alone(held) if tied else frozenset[int]()
    ways = slots_in_run(numels, buffer.total, shared, _views(held))
    if len(ways) > 1:
        ways = [slots for slots in ways if _padding_is_zero(source, buffer, slots)]
    if len(ways) != 1:
        raise Unnamed(
            f"a buffer of {buffer.total:,} elements, into which the {len(held):,} parameters of"
            f" {sum(numels):,} fit in {len(ways) or 'no'} ways"
        )
    return ways[0]


def _padding_is_zero(source: Source, buffer: Buffer, slots: Sequence[Slot]) -> bool:
    return not any(
        any(_bytes(source, piece))
        for start, stop in gaps(slots)
        for run in buffer.runs.values()
        for piece in runs_between(run, start, stop)
    )


def _bytes(source: Source, stored: Stored) -> bytes:
    nbytes = (stored.stop - stored.start) * stored.dtype.itemsize
    if not isinstance(stored.at, Extent):
        return b""
    return source.read(stored.at.file, stored.at.offset, nbytes)


def _alone(held: Sequence[Held]) -> Set[int]:
    return {position for position, one in enumerate(held) if one.name in SHARED}


def _views(held: Sequence[Held]) -> list[int | None]:
    """Where the parameters begin in the buffer, if they were saved as views of one storage."""
    storages = {one.view[0] if one.view else None for one in held}
    if len(storages) != 1 or None in storages or len(held) == 1:
        return [None] * len(held)
    return [one.view[1] if one.view else None for one in held]
