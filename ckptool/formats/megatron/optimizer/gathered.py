"""``distrib_optim.pt``: the state of Megatron's distributed optimizer, gathered by rank 0.

One run of elements for each buffer, its buckets one after the other (``buckets_coalesced``), or one
tensor a bucket before (``get_parameter_state_dp_zero``, megatron-core 0.5 to 0.20; the optimizer
``dp_zero_gather_scatter`` of torch_dist is the same). A list holds one of these for each of several
optimizers: dense parameters first, then experts of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ckptool.core.catalog import Extent, Place
from ckptool.errors import Undetermined
from ckptool.formats.megatron.names import is_expert
from ckptool.formats.megatron.optimizer.buckets import MASTER, Slot, gaps, slots_in_run
from ckptool.formats.megatron.parameters import Fragments, LocalParameter, StorageRun, runs_between
from ckptool.serialization.archive.tensors import StoredTensor, plain_tensor
from ckptool.serialization.pickle.records import Global
from ckptool.serialization.source import Source

_LAYOUT = ("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded")
SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One saved buffer: its parameters' element type, and the runs of each kind of state."""

    dtype: str | None
    runs: dict[str, list[StorageRun]]

    @property
    def total(self) -> int:
        return max((run[-1].stop for run in self.runs.values()), default=0)


def saved_buffers(value: Any, place: Any) -> list[list[Buffer] | None]:
    """Return each optimizer's buffers, in order; None where another rank's file has them.

    ``place`` says where a tensor of the file lies.
    """
    optimizers = value if isinstance(value, list) else [value]
    return [list(_buffers(one, place)) if isinstance(one, dict) else None for one in optimizers]


def stray_keys(value: Any) -> list[Any]:
    """Return the keys of the file's dicts that are neither numbers of buffers nor the layout's."""
    optimizers = value if isinstance(value, list) else [value]
    keys = [key for one in optimizers if isinstance(one, dict) for key in one]
    return [key for key in keys if type(key) is not int and key not in _LAYOUT]


def _buffers(optimizer: dict[Any, Any], place: Any) -> Iterator[Buffer]:
    for number, by_dtype in optimizer.items():
        if type(number) is int and isinstance(by_dtype, dict):
            for dtypes, state in by_dtype.items():
                yield Buffer(param_dtype(dtypes), dict(_runs(state, place)))


def param_dtype(dtypes: Any) -> str | None:
    """Return the parameters' element type, of a buffer's key (parameters' and gradients' type)."""
    first = dtypes[0] if isinstance(dtypes, tuple) and len(dtypes) == 2 else None
    return first.name if isinstance(first, Global) else None


def _runs(state: Any, place: Any) -> Iterator[tuple[str, list[StorageRun]]]:
    for kind, value in state.items() if isinstance(state, dict) else ():
        tensors = [plain_tensor(item) for item in (value if isinstance(value, list) else [value])]
        if tensors and all(tensor is not None and len(tensor.shape) == 1 for tensor in tensors):
            yield str(kind), list(_consecutive([t for t in tensors if t], place))


def _consecutive(tensors: Sequence[StoredTensor], place: Any) -> Iterator[StorageRun]:
    start = 0
    for tensor in tensors:
        at: Place = place(tensor)
        yield StorageRun(tensor.shape, tensor.dtype, at, start)
        start += tensor.shape[0]


def expected_buffers(
    runs: Sequence[Sequence[LocalParameter]], expert_parallel: bool
) -> list[list[list[LocalParameter]]]:
    """Return the parameters of each buffer of each optimizer, in their order.

    ``runs`` are a rank's parameters by virtual pipeline stage. Experts of several ranks have an
    optimizer of their own, after the one of all other parameters.
    """
    if not expert_parallel:
        return [_by_dtype(runs)]
    dense = [[one for one in run if not is_expert(one.name)] for run in runs]
    experts = [[one for one in run if is_expert(one.name)] for run in runs]
    return [_by_dtype(dense), _by_dtype(experts)]


def _by_dtype(runs: Sequence[Sequence[LocalParameter]]) -> list[list[LocalParameter]]:
    buffers: list[list[LocalParameter]] = []
    for held in runs:
        by_dtype: dict[str, list[LocalParameter]] = {}
        for one in held:
            by_dtype.setdefault(one.dtype.name, []).append(one)
        buffers += by_dtype.values()
    return buffers


def matched_buffers(
    saved: Sequence[list[Buffer] | None], expected: Sequence[list[list[LocalParameter]]]
) -> list[tuple[Buffer, list[LocalParameter]]]:
    """Return each saved buffer with its parameters.

    Raises Undetermined where their numbers differ.
    """
    if len(saved) != len(expected) and None not in saved:
        saved = [[buffer for buffers in saved for buffer in buffers or ()]]
        expected = [[held for buffers in expected for held in buffers]]
    counts = [len(one) if one is not None else None for one in saved]
    if len(saved) != len(expected) or any(
        count not in (None, len(held)) for count, held in zip(counts, expected, strict=True)
    ):
        raise Undetermined(
            f"{counts} buffers, where the model has {[len(one) for one in expected]}"
        )
    return [
        pair
        for buffers, held in zip(saved, expected, strict=True)
        if buffers is not None
        for pair in zip(buffers, held, strict=True)
    ]


def gathered_state(
    source: Source, buffers: Iterable[tuple[Buffer, Sequence[LocalParameter]]], tied: bool
) -> Fragments:
    """Return what buffers hold of their parameters. Raises Undetermined where they do not fit.

    Where parameters fit in several ways, the one whose padding is zero is taken: that padding is
    all that is read of a tensor here.
    """
    found: Fragments = {}
    for buffer, held in buffers:
        for one, slot in zip(held, _slots(source, buffer, held, tied), strict=True):
            for kind, runs in buffer.runs.items():
                name = "fp32" if kind == MASTER else kind
                cut = runs_between(runs, slot.start, slot.stop)
                found.setdefault((name, one.name), []).append((one, cut))
    return found


def _slots(
    source: Source, buffer: Buffer, held: Sequence[LocalParameter], tied: bool
) -> list[Slot]:
    if {run[-1].stop for run in buffer.runs.values()} != {buffer.total}:
        raise Undetermined("its states are of different lengths")
    if buffer.dtype not in (None, held[0].dtype.name):
        raise Undetermined(f"a buffer of {buffer.dtype}, where the model has {held[0].dtype}")
    numels = [one.numel for one in held]
    shared = _alone(held) if tied else frozenset[int]()
    ways = slots_in_run(numels, buffer.total, shared, _views(held))
    if len(ways) > 1:
        ways = [slots for slots in ways if _padding_is_zero(source, buffer, slots)]
    if len(ways) != 1:
        raise Undetermined(
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


def _bytes(source: Source, stored: StorageRun) -> bytes:
    nbytes = (stored.stop - stored.start) * stored.dtype.itemsize
    if not isinstance(stored.at, Extent):
        return b""
    return source.read(stored.at.file, stored.at.offset, nbytes)


def _alone(held: Sequence[LocalParameter]) -> Set[int]:
    return {position for position, one in enumerate(held) if one.name in SHARED}


def _views(held: Sequence[LocalParameter]) -> list[int | None]:
    """Where the parameters begin in the buffer, if they were saved as views of one storage."""
    storages = {one.view[0] if one.view else None for one in held}
    if len(storages) != 1 or None in storages or len(held) == 1:
        return [None] * len(held)
    return [one.view[1] if one.view else None for one in held]
