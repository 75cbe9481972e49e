"""Where parameters lie in DeepSpeed's partitions, and what a rank keeps of them.

Where each parameter lies in DeepSpeed's flat partitions. Pure geometry, in elements.

ZeRO 1 and 2 (``runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``) put the parameters of a
group one after the other, pad the end, and cut the whole into one partition a rank. ZeRO 3
(``stage3.py``) cuts each parameter by itself: rank r holds elements r * s to (r + 1) * s, where s
is its size divided by the ranks, rounded up.

What a rank keeps of one flat group of DeepSpeed's ZeRO optimizers: the same for all stages.

Notice a rank's file that is a copy of another rank's.

What one model-parallel rank holds, before tensor-parallel and pipeline ranks are merged.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, Path, Place, Record, flat_name
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import RankShard
from ckptool.core.views import pieces_of_run
from ckptool.errors import Damaged, Refusal
from ckptool.formats.deepspeed.states import State, Vector
from ckptool.serialization.state_dict.leaves import Barred, Leaf, PlainLeaf, refusal_in

Shapes = Mapping[str, tuple[int, ...]]
"""Parameters by name, in the order in which a flat buffer holds them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``start`` to ``stop`` of a parameter, at element ``at`` of partition ``part``."""

    name: str
    start: int
    stop: int
    part: int
    at: int


def flat_runs(shapes: Shapes, paddings: Sequence[int], size: int, parts: int) -> Iterator[Run]:
    """The runs of a group that was laid out flat and cut into ``parts`` partitions of ``size``.

    ``paddings`` are the elements left free after each parameter. Raises Damaged where the group
    does not fill its partitions up to the alignment, which is less than two elements a partition.
    """
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        for part in range(offset // size, -(-(offset + numel) // size)) if size else ():
            lo, hi = max(offset, part * size), min(offset + numel, (part + 1) * size)
            if lo < hi:
                yield Run(name, lo - offset, hi - offset, part, lo - part * size)
        offset += numel + padding
    if not 0 <= size * parts - offset < max(2 * parts, 1):
        raise Damaged(
            f"{len(shapes):,} parameters of {offset:,} elements do not fit {parts:,} partitions"
            f" of {size:,} elements",
            "storage-mismatch",
        )


def split_runs(shapes: Shapes, sizes: Sequence[int], part: int, parts: int) -> Iterator[Run]:
    """Yield the runs of one rank where each parameter was cut by itself into ``parts`` pieces.

    ``sizes`` are the elements of the rank's sub groups, whose concatenation ``at`` counts through.
    Raises Damaged where the pieces do not fill the sub groups exactly.
    """
    ends = list(accumulate(sizes))
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        piece = -(-numel // parts)
        lo, hi = min(part * piece, numel), min((part + 1) * piece, numel)
        if lo < hi:
            yield Run(name, lo, hi, part, offset)
        crossed = bisect_right(ends, offset)
        offset += piece
        if crossed < len(ends) and ends[crossed] < offset:
            raise Damaged(
                f"{name}: its piece of {piece:,} elements crosses the end of a sub group",
                "storage-mismatch",
            )
    if offset != sum(sizes):
        raise Damaged(
            f"{len(shapes):,} parameters take {offset:,} elements of rank {part}'s sub groups,"
            f" which hold {sum(sizes):,}",
            "storage-mismatch",
        )


def run_chunks(
    run: Run, shape: tuple[int, ...], at: Place, itemsize: int, rank: int
) -> list[Chunk]:
    """Return the chunks of a run whose partition lies at ``at``, a contiguous vector."""
    stored = (run.at + run.stop - run.start,)
    pieces = pieces_of_run(at, stored, run.start, run.stop, shape, itemsize, run.at)
    return [Chunk(box, place, rank) for box, place in pieces]


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
    """Return the master and the optimizer's state of one group.

    What is as long as it, is flat as well.

    ``padding`` is how many elements longer than the master a state may be.
    """
    vector = state.vector(master)
    if vector is None or not vector.is_flat:
        raise Damaged(
            f"{state.file.what}: a flat group of masters is not a flat tensor", "tensor-record"
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


def refuse_kinds(
    found: RankContents, slots: Sequence[Slot], names: Iterable[str], rank: int
) -> None:
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
    found: RankContents,
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
            f"{partition.state.file.what}: {kind}.{name} needs elements {run.at:,} to"
            f" {run.at + run.stop - run.start:,} of a partition that holds {held:,}",
            "storage-mismatch",
        )
    shape = shapes[run.name]
    chunks = run_chunks(run, shape, vector.at, vector.dtype.itemsize, partition.rank)
    found.add((kind, name), vector.dtype, shape, chunks)


def add_other(
    found: RankContents, ranks: Sequence[Partition], held: Sequence[Slot], number: int
) -> None:
    """Keep what is neither flat nor a scalar for each rank, under the optimizer's own names."""
    for partition, slot in zip(ranks, held, strict=True):
        for kind, value in slot.other.items():
            path = ("optimizer", "state", number, kind)
            found.add_leaf(path, value, partition.rank, rank_state=True)


_FEWEST = 16
_PIECE = 1 << 20


def require_distinct(held: Sequence[tuple[str, Sequence[Vector], Sequence[Vector]]]) -> None:
    """Raise Damaged where two files hold the same partitions, which different ranks never do.

    ``held`` are the files with their masters and the optimizer's states. Only recorded checksums
    are compared; ranks whose states are all zero, or that hold next to nothing, may be alike.
    """
    first: dict[tuple[tuple[int, int], ...], str] = {}
    for file, masters, states in held:
        records = list(filter(None, map(_record, (*masters, *states))))
        if len(records) < len(masters) + len(states) or _elements(masters) < _FEWEST:
            continue
        key = tuple((record.crc32, record.nbytes) for record in records)
        if first.setdefault(key, file) != file and not all(map(_is_zero, records[len(masters) :])):
            message = (
                f"{file} holds the same partitions as {first[key]}: one was copied over the other"
            )
            raise Damaged(message, "rank-copied", file=file)


def _record(vector: Vector) -> Record | None:
    return vector.at.record if isinstance(vector.at, Extent) else None


def _elements(vectors: Sequence[Vector]) -> int:
    return sum(vector.shape[0] for vector in vectors)


def _is_zero(record: Record) -> bool:
    """Return whether a record's checksum is that of zeros."""
    crc, left = 0, record.nbytes
    while left > 0:
        crc = zlib.crc32(bytes(min(left, _PIECE)), crc)
        left -= _PIECE
    return crc == record.crc32


MASTER = "fp32"
"""The kind of the weights that an optimizer keeps in full precision."""
_T = TypeVar("_T")
Name = tuple[str, str]
"""A kind (``fp32``, ``exp_avg``, ``module``, ...) and a parameter."""


@dataclass(slots=True)
class RankContents:
    """What the files of one model-parallel rank hold.

    ``leaves`` are values and tensors that every rank holds alike, by rank and flat name.
    ``notes`` say what is not carried, ``barred`` why masters and moments cannot be placed.
    """

    tensors: dict[Name, RankShard] = field(default_factory=dict)
    leaves: dict[int, dict[str, Leaf]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    barred: Refusal | None = None

    def add(self, name: Name, dtype: DType, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        """Add chunks of a tensor. Damaged where another file gives it another type or shape."""
        local = self.tensors.setdefault(name, RankShard(dtype, shape))
        if (local.dtype, local.shape) != (dtype, shape):
            raise Damaged(
                f"{'.'.join(name)}: {local.dtype} {list(local.shape)} in one file,"
                f" {dtype} {list(shape)} in another",
                "ranks-disagree",
            )
        local.chunks.extend(chunks)

    def add_whole(self, name: Name, vector: Vector, rank: int) -> None:
        """Add a tensor that one file holds whole."""
        box = Box.whole(vector.shape)
        self.add(name, vector.dtype, vector.shape, [Chunk(box, vector.at, rank)])

    def add_leaf(self, path: Path, value: Any, rank: int, *, rank_state: bool = False) -> None:
        """Add a value, or a ``Vector``, that other ranks may hold as well.

        A value of which a part is refused is so under its own name.
        """
        why = refusal_in(value)
        if why is not None:
            value = why.derived_for(flat_name(path))
        elif isinstance(value, Vector):
            value = PlainLeaf(value.at, value.tensor)
        self.add_leaves({flat_name(path): Leaf(path, value, rank_state)}, rank)

    def add_leaves(self, leaves: Mapping[str, Leaf], rank: int) -> None:
        """Add values that are leaves already. What is refused once stays so."""
        held = self.leaves.setdefault(rank, {})
        for name, leaf in leaves.items():
            if name not in held or not isinstance(held[name].value, Refusal):
                held[name] = leaf

    def attempt(self, work: Callable[[RankContents], _T]) -> _T | None:
        """Add the masters and moments that ``work`` adds to a holding; return what it returns.

        Where they depend on a part that is refused, or are ``barred`` already, none are added.
        """
        more = RankContents()
        try:
            found = None if self.barred is not None else work(more)
        except Barred as error:
            self.barred = error.refusal
            return None
        for name, local in more.tensors.items():
            self.add(name, local.dtype, local.shape, local.chunks)
        for rank, leaves in more.leaves.items():
            self.add_leaves(leaves, rank)
        self.notes += more.notes
        return found

    def refuse_masters(self, part: str) -> None:
        """Say why the masters and moments of this rank, which are of this ``part``, are barred."""
        if self.barred is not None:
            why = self.barred.derived_for(MASTER, "masters and moments are not placed: ")
            why.part = part
            self.add_leaves({MASTER: Leaf((MASTER,), why)}, 0)
