"""DeepSpeed's flat groups on ranks: partitions, and the runs of parameters in them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec import Struct, field

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, Path, Place, Record, TensorEntry, flat_name
from ckptool.core.dtype import DType
from ckptool.core.views import shift_place, split_dim
from ckptool.errors import Damaged, Refusal
from ckptool.formats.deepspeed.checkpoint import RankState
from ckptool.formats.deepspeed.states import State, require_shallow_dict
from ckptool.serialization.archive.tensors import is_tensor_record
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import (
    Barred,
    Leaf,
    PlainLeaf,
    find_refusal,
    read_leaves,
)
from ckptool.serialization.state_dict.values import (
    note_stray_keys,
    same_value,
    unread_tensor,
    walk_parts,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Parameters by name, in the order in which a flat buffer holds them."""
Name = tuple[str, str]
"""A kind (``fp32``, ``exp_avg``, ``module``, ...) and a parameter."""
MASTER = "fp32"
"""The kind of the weights that an optimizer keeps in full precision."""
STATES = frozenset(
    "fp32 exp_avg exp_avg_sq step max_exp_avg_sq exp_inf momentum_buffer sum square_avg grad_avg"
    " acc_delta worker_error server_error".split()
)
"""The names of a parameter's state in DeepSpeed's and torch's optimizers."""
STEP = "step"
MODEL_KINDS = ("module", "frozen", "buffer")
"""The kinds of what the model itself has."""
_QUANT_STATE, _CODES = "__bnb_optimizer_quant_state__", {"qmap1", "absmax1"}
_FEWEST = 16
"""Elements of which ranks' partitions are compared: fewer may be equal without being copied."""
_PIECE = 1 << 20
_T = TypeVar("_T")
_P = ParamSpec("_P")


class FlatRun(Struct, frozen=True):
    """Elements ``start`` to ``stop`` of a parameter, at element ``at`` of partition ``part``."""

    name: str
    start: int
    stop: int
    part: int
    at: int


def cut_evenly(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements ZeRO 3 gives a rank: equal parts, rounded up; the last may have fewer."""
    numel = math.prod(shape)
    size = -(-numel // ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def is_flat(tensor: PlainLeaf) -> bool:
    """Return whether it has one contiguous dim, as flat partitions do."""
    shape = tensor.shape
    return len(shape) == 1 and (shape[0] < 2 or tensor.tensor.strides == (1,))


def place_run(
    run: FlatRun, dtype: DType, shape: tuple[int, ...], at: Place, rank: int
) -> Sequence[Chunk]:
    """Return the chunks of a run whose partition lies at ``at``, a contiguous vector."""
    chunk = Chunk(Box((run.start,), (run.stop,)), shift_place(at, (run.at,)), rank)
    flat = TensorEntry(run.name, (), dtype, (math.prod(shape),), (chunk,))
    return split_dim(flat, 0, shape).chunks


class RankShard(Struct, frozen=True):
    """One rank's shard of a tensor, so far; its chunks are in its own coordinates."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


class RankContents(Struct):
    """The content of one model-parallel rank's files.

    ``leaves`` are values and tensors that every rank has alike, by rank and flat name. ``notes``
    say what is not carried, ``barred`` why masters and moments cannot be placed.
    """

    tensors: dict[Name, RankShard] = field(default_factory=dict)
    leaves: dict[int, dict[str, Leaf]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    barred: Refusal | None = None

    def add(
        self, name: Name, dtype: DType, shape: tuple[int, ...], chunks: Sequence[Chunk]
    ) -> None:
        """Add chunks of a tensor; Damaged if another file has another type or shape for it."""
        shard = self.tensors.setdefault(name, RankShard(dtype, shape))
        if (shard.dtype, shard.shape) != (dtype, shape):
            raise Damaged(
                f"{'.'.join(name)}: {shard.dtype} {list(shard.shape)} in one file,"
                f" {dtype} {list(shape)} in another",
                "ranks-disagree",
            )
        shard.chunks.extend(chunks)

    def add_whole(self, name: Name, vector: PlainLeaf, rank: int) -> None:
        """Add a tensor that one file holds whole."""
        box = Box.whole(vector.shape)
        self.add(name, vector.dtype, vector.shape, [Chunk(box, vector.place, rank)])

    def add_run(
        self, name: Name, run: FlatRun, shape: tuple[int, ...], vector: PlainLeaf, rank: int
    ) -> None:
        """Add the run of a tensor of ``shape`` that lies in a flat vector."""
        chunks = place_run(run, vector.dtype, shape, vector.place, rank)
        self.add(name, vector.dtype, shape, chunks)

    def add_leaf(self, path: Path, value: Any, rank: int, *, rank_state: bool = False) -> None:
        """Add a value, or a tensor, that other ranks may have as well.

        A partly refused value is refused under its own name.
        """
        why = find_refusal(value)
        if why is not None:
            value = why.derived_for(flat_name(path))
        self.add_leaves({flat_name(path): Leaf(path, value, rank_state)}, rank)

    def add_leaves(self, leaves: Mapping[str, Leaf], rank: int) -> None:
        """Add values that are leaves already. Refused ones stay refused."""
        rank_leaves = self.leaves.setdefault(rank, {})
        for name, leaf in leaves.items():
            if name not in rank_leaves or not isinstance(rank_leaves[name].value, Refusal):
                rank_leaves[name] = leaf

    def add_stray(self, file: str, values: Mapping[Any, Any], rank: int, prefix: Path = ()) -> None:
        """Note the entries of a file that its format does not have; refuse those with tensors."""
        paths = {key: (*prefix, str(key)) for key in values}
        refused = {k: unread_tensor(flat_name(paths[k]), value) for k, value in values.items()}
        leaves = {key: Leaf(paths[key], why) for key, why in refused.items() if why is not None}
        self.add_leaves({flat_name(leaf.path): leaf for leaf in leaves.values()}, rank)
        self.notes += note_stray_keys(file, [key for key in values if key not in leaves])

    def attempt(
        self, add: Callable[Concatenate[RankContents, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T | None:
        """Add the masters and moments that ``add`` adds to other contents; return its result.

        If they depend on a refused part, or are already ``barred``, none are added.
        """
        contents = RankContents()
        try:
            result = None if self.barred is not None else add(contents, *args, **kwargs)
        except Barred as error:
            self.barred = error.refusal
            return None
        for name, shard in contents.tensors.items():
            self.add(name, shard.dtype, shard.shape, shard.chunks)
        for rank, leaves in contents.leaves.items():
            self.add_leaves(leaves, rank)
        self.notes += contents.notes
        return result

    def refuse_masters(self, part: str) -> None:
        """Refuse the masters and moments of this rank, which are of this ``part``, if barred."""
        if self.barred is not None:
            why = self.barred.derived_for(MASTER, "masters and moments are not placed: ")
            why.part = part
            self.add_leaves({MASTER: Leaf((MASTER,), why)}, 0)


class FlatSlot(Struct):
    """One rank's part of one flat group: partitions, complete values, and refused kinds."""

    flat: dict[str, PlainLeaf] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)


def read_flat_slot(state: State, master: Any, values: Mapping[str, Any], padding: int) -> FlatSlot:
    """Return the master and the optimizer's state of one group.

    A state of the master's length is flat as well; it may be ``padding`` elements longer. Blocks of
    8-bit state are cut without regard to parameters: it stays as it is.
    """
    vector = state.vector(master)
    if vector is None or not is_flat(vector):
        raise Damaged(
            f"{state.file.what}: the masters of a flat group are not a flat tensor", "tensor-record"
        )
    slot, least = FlatSlot({MASTER: vector}), vector.shape[0]
    inner = require_shallow_dict(values.get(_QUANT_STATE))
    for kind, value in (values if _CODES & inner.keys() else lift_state(values)).items():
        why, tensor = find_refusal(value), state.vector(value)
        if why is not None:
            slot.refused[kind] = why
        elif tensor is not None and is_flat(tensor) and 0 <= tensor.shape[0] - least <= padding:
            slot.flat[kind] = tensor
        elif (tensor is not None and tensor.shape == ()) or isinstance(value, int | float):
            slot.scalars[kind] = tensor or value
        else:
            slot.other[kind] = tensor or value
    return slot


def lift_state(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's state with what bitsandbytes (0.45 to 0.50) keeps of it in a dict."""
    inner = values.get(_QUANT_STATE)
    if not isinstance(inner, dict):
        return values
    return {**{kind: value for kind, value in values.items() if kind != _QUANT_STATE}, **inner}


def keep_own_scalars(source: Source, slots: Sequence[FlatSlot]) -> None:
    """Let each partition keep the scalars that differ between them, as in Adafactor: the RMS.

    Those are of partitions, not of parameters. All count the same steps.
    """
    for kind in dict.fromkeys(kind for slot in slots for kind in slot.scalars):
        holders = [slot for slot in slots if kind in slot.scalars]
        first, *rest = (_scalar_bytes(source, slot.scalars[kind]) for slot in holders)
        if kind != STEP and not all(same_value(first, other) for other in rest):
            for slot in holders:
                slot.other[kind] = slot.scalars.pop(kind)


def _scalar_bytes(source: Source, value: Any) -> Any:
    """Return what tells whether two scalars are equal."""
    if not isinstance(value, PlainLeaf):
        return value
    at, dtype = value.place, value.dtype
    if not isinstance(at, Extent):
        return None, value
    return str(dtype), at.ops, source.read(at.file, at.offset, dtype.itemsize)


def refuse_kinds(
    contents: RankContents, slots: Sequence[FlatSlot], names: Iterable[str], rank: int
) -> None:
    """Refuse the state of parameters that one slot cannot read, and the other slots' parts of it.

    It is removed from all slots. State that no known optimizer keeps of a parameter, and no slot
    has, keeps its own name.
    """
    refused = {kind: why for slot in slots for kind, why in slot.refused.items()}
    for kind, why in refused.items():
        if kind in STATES or any(kind in slot.flat or kind in slot.scalars for slot in slots):
            for name in names:
                contents.add_leaf((kind, name), why, rank)
        for slot in slots:
            slot.flat.pop(kind, None)
            slot.scalars.pop(kind, None)


def add_partition_run(
    contents: RankContents,
    partition: RankState,
    vector: PlainLeaf | None,
    name: Name,
    run: FlatRun,
    shape: tuple[int, ...],
) -> None:
    """Add one partition's part of a tensor; Damaged if the partition is shorter than that."""
    size = vector.shape[0] if vector else 0
    end = run.at + run.stop - run.start
    if vector is None or end > size:
        raise Damaged(
            f"{partition.state.file.what}: {'.'.join(name)} needs elements {run.at:,} to"
            f" {end:,} of a partition that holds {size:,}",
            "storage-mismatch",
        )
    contents.add_run(name, run, shape, vector, partition.rank)


def add_other(
    contents: RankContents,
    source: Source,
    ranks: Sequence[RankState],
    slots: Sequence[FlatSlot],
    number: int,
) -> None:
    """Keep what is neither flat nor a scalar for each rank, under the optimizer's own names.

    Tensors inside other values become tensors by themselves.
    """
    for partition, slot in zip(ranks, slots, strict=True):
        for kind, value in slot.other.items():
            path = ("optimizer", "state", number, kind)
            if not isinstance(value, PlainLeaf) and any(map(is_tensor_record, walk_parts(value))):
                file = partition.state.file.narrowed(value)
                leaves = read_leaves(file, source, prefix=path, rank_state=True)
                contents.add_leaves(leaves, partition.rank)
            else:
                contents.add_leaf(path, value, partition.rank, rank_state=True)


def require_distinct_ranks(ranks: Sequence[RankState], slots: Sequence[Sequence[FlatSlot]]) -> None:
    """Raise Damaged if a rank's file is a copy of another's; ``slots`` are those of each rank.

    Different ranks never have the same partitions. Only recorded checksums are compared; ranks
    whose states are all zero, or that have next to nothing, may be equal.
    """
    first: dict[tuple[tuple[int, int], ...], str] = {}
    for rank, rank_slots in zip(ranks, slots, strict=True):
        masters = [slot.flat[MASTER] for slot in rank_slots]
        states = [v for slot in rank_slots for kind, v in slot.flat.items() if kind != MASTER]
        places = [vector.place for vector in (*masters, *states)]
        records = [at.record for at in places if isinstance(at, Extent) and at.record]
        if len(records) < len(places) or sum(v.shape[0] for v in masters) < _FEWEST:
            continue
        key = tuple((record.crc32, record.nbytes) for record in records)
        file = rank.state.file.what
        if first.setdefault(key, file) != file and not all(map(_is_zero, records[len(masters) :])):
            message = (
                f"{file} holds the same partitions as {first[key]}: one was copied over the other"
            )
            raise Damaged(message, "rank-copied", file=file)


def _is_zero(record: Record) -> bool:
    """Return whether a record's checksum is that of zeros."""
    crc, remainder = 0, record.nbytes
    while remainder > 0:
        crc = zlib.crc32(bytes(min(remainder, _PIECE)), crc)
        remainder -= _PIECE
    return crc == record.crc32
