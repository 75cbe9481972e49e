"""Megatron-core's state dict in a local checkpoint: ``MCoreTensorAwareStateDict``.

Every tensor is a ``ShardedTensor`` record under its module's own name: its key, the shape of the
whole tensor, and where the rank's part lies in it. With ``fully_parallel`` a rank has no data for
the parts that its data-parallel partners hold (megatron-core 0.11 to 0.20).

Megatron-core's records of what a rank holds: ``ShardedTensor`` and ``ShardedObject``.

Local checkpoints are pickles of them (megatron-core 0.11 to 0.20, ``dist_checkpointing``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, TensorEntry, flat_name, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import Fit
from ckptool.errors import Damaged, Undetermined
from ckptool.formats.megatron.names import global_expert, global_layer, is_buffer, is_expert
from ckptool.formats.megatron.optimizer.buckets import Group, bucket_state, buckets_among, is_bucket
from ckptool.formats.megatron.optimizer.gathered import expected_buffers
from ckptool.formats.megatron.parameters import Fragments, LocalParameter, merge_fragments
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import dtype_of, natural, place_of, plain_tensor, sizes
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, read_leaves
from ckptool.serialization.state_dict.tree import leaves

ROOT = "MCoreTensorAwareStateDict"
_MODEL = re.compile(r"model[0-9]{0,4}")
_NUMBERED = re.compile(r"\blayers\.[0-9]")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)([0-9]+)")
_LOCAL_EXPERT = re.compile(r"(local_experts\.)[0-9]+|(linear_fc[12]\.(?:weight|bias))[0-9]+$")
_EMBEDDING = "embedding.word_embeddings.weight"
_STACKED_EXPERTS = ".experts.experts."


@dataclass(slots=True)
class _Ranks:
    """What all ranks' files hold together."""

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    kinds: dict[str, tuple[DType, tuple[int, ...]]] = field(default_factory=dict)
    runs: dict[Group, list[list[LocalParameter]]] = field(default_factory=dict)
    fits: dict[tuple[str, tuple[int, ...]], Fit] = field(default_factory=dict)
    others: dict[int, dict[str, Leaf]] = field(default_factory=dict)


def read_megatron(
    source: Source, files: Mapping[int, TorchFile], expert_parallel: bool
) -> tuple[Assembled, str]:
    """Return the tensors ``model.<name>``, ``fp32.<name>``, ... and values of all ranks' files.

    The text says why the optimizer's state has no names, where it has none.
    """
    ranks = _Ranks()
    for rank, file in files.items():
        _read_rank(source, rank, file, ranks, expert_parallel)
    tensors = {
        name: TensorEntry(name, _path(name), *ranks.kinds[name], merge_copies(chunks))
        for name, chunks in ranks.chunks.items()
    }
    found = assemble(ranks.others)
    model = {name: entry for name, entry in tensors.items() if not is_bucket(name)}
    try:
        state = _state(tensors, ranks)
        reason = ""
    except Undetermined as error:
        state, reason = tensors, str(error)
    found.tensors = model | state | found.tensors
    return found, reason


def _path(name: str) -> Path:
    head, _, rest = name.partition(".")
    return (head, rest) if head == "model" else (name,)


def _state(tensors: Mapping[str, TensorEntry], ranks: _Ranks) -> dict[str, TensorEntry]:
    """Return the optimizer's state by parameter. Raises Undetermined."""
    found: Fragments = {}
    for group, buffers in buckets_among(tensors.values()).items():
        if group not in ranks.runs:
            raise Undetermined(f"no rank's model goes with the buckets of group {group[1]}")
        expected = expected_buffers(ranks.runs[group], expert_parallel=False)[0]
        for path, parts in bucket_state(buffers, expected).items():
            found.setdefault(path, []).extend(parts)
    whole = merge_fragments(lambda held: ranks.fits[held.name, held.rank], found)
    if whole.conflicts:
        raise Undetermined(next(iter(whole.conflicts.values())))
    return whole.tensors


def _read_rank(
    source: Source, rank: int, file: TorchFile, ranks: _Ranks, expert_parallel: bool
) -> None:
    fields = file.inert.fields if isinstance(file.inert, Call) else {}
    runs: dict[str, list[LocalParameter]] = {}
    groups: set[Group] = set()
    others = ranks.others.setdefault(rank, {})
    for path, parts in sharded_records(fields.get("sharded_state_dict"), file, rank):
        if isinstance(parts, Leaf):
            inner = file.narrowed(parts.value)
            others |= read_leaves(inner, source, prefix=parts.path, rank_state=True, refuse=True)
        elif _MODEL.fullmatch(str(path[0])):
            held = _parameter(path, parts, rank, ranks)
            if not is_buffer(held.name):
                runs.setdefault(str(path[0]), []).append(held)
        else:
            for part in parts:
                _add(ranks, part.key, part.dtype, part.whole, part.chunk)
                groups |= set(buckets_among([_empty(part)]))
    others |= read_leaves(file.narrowed(fields.get("common")), source, refuse=True)
    for group in groups:
        ranks.runs[group] = [
            [one for one in run if (group[0] > 0) == (expert_parallel and is_expert(one.name))]
            for run in runs.values()
        ]


def _empty(part: Sharded) -> TensorEntry:
    return TensorEntry(part.key, (part.key,), part.dtype, part.whole, ())


def _add(
    ranks: _Ranks, name: str, dtype: DType, whole: tuple[int, ...], chunk: Chunk | None
) -> None:
    known = ranks.kinds.setdefault(name, (dtype, whole))
    if known != (dtype, whole):
        raise Damaged(
            f"{name}: ranks hold it as {known[0]} {list(known[1])} and {dtype} {list(whole)}",
            "ranks-disagree",
        )
    chunks = ranks.chunks.setdefault(name, [])
    if chunk is not None:
        chunks.append(chunk)


def _parameter(path: Path, parts: Sequence[Sharded], rank: int, ranks: _Ranks) -> LocalParameter:
    """Return a parameter of the rank's model.

    One of several parts is joined along its first dim.
    """
    parts = side_by_side(parts)
    first = parts[0]
    name = _whole_name(flat_name(path[1:2]), first)
    pieces, local = _joined(parts)
    whole = first.whole[first.prepended :]
    held = LocalParameter(name, (rank, 0, 0), rank, local, first.dtype)
    ranks.fits[name, held.rank] = Fit(local, whole, pieces)
    for part in parts:
        chunk = part.chunk
        inner = Box(part.box.lo[part.prepended :], part.box.hi[part.prepended :])
        placed = Chunk(inner, chunk.at, chunk.rank) if chunk else None
        _add(ranks, f"model.{name}", first.dtype, whole, placed)
    return held


def _joined(parts: Sequence[Sharded]) -> tuple[tuple[tuple[Box, Box], ...], tuple[int, ...]]:
    """Return the parts' boxes in the rank's tensor and in the whole one, and the rank's shape."""
    boxes = [Box(p.box.lo[p.prepended :], p.box.hi[p.prepended :]) for p in parts]
    local = list(boxes[0].shape)
    if len(boxes) == 1:
        return ((Box.whole(local), boxes[0]),), tuple(local)
    pieces, start = [], 0
    for box in boxes:
        lo = [start, *(0,) * (len(local) - 1)]
        pieces.append((Box.at(lo, box.shape), box))
        start += box.shape[0]
    return tuple(pieces), (start, *local[1:])


def _whole_name(name: str, part: Sharded) -> str:
    """The name with the numbers that layer and expert have in the whole model, by the stacked dims.

    The last stage's copy of a tied embedding has the embedding's name.
    """
    if part.key.endswith(_EMBEDDING):
        return part.key
    offsets = list(part.box.lo[: part.prepended])
    layer = _LAYER.match(name)
    if offsets and layer and not _NUMBERED.search(part.key):
        name = global_layer(name, {layer[1]: offsets.pop(0) - int(layer[2])})
    if offsets and _STACKED_EXPERTS in f".{part.key}":
        return _with_expert(name, offsets.pop(0))
    return name


def _with_expert(name: str, number: int) -> str:
    return global_expert(_LOCAL_EXPERT.sub(r"\g<1>\g<2>0", name), number)


@dataclass(frozen=True, slots=True)
class Sharded:
    """One ``ShardedTensor`` record: a rank's part of the tensor ``key``; its data if it has any.

    ``whole`` and ``box`` have ``prepended`` dims more than the rank's tensor.
    """

    key: str
    dtype: DType
    whole: tuple[int, ...]
    box: Box
    prepended: int
    chunk: Chunk | None


def side_by_side(parts: Sequence[Sharded]) -> Sequence[Sharded]:
    """Parts of several tensors as parts of one, which holds one tensor after the other.

    So z, x, B, C and dt are kept apart that are one ``in_proj`` of Mamba's in the rank's model.
    Raises Damaged where their dims differ.
    """
    if len(parts) == 1:
        return parts
    first = parts[0]
    if any(
        len(part.whole) != len(first.whole) or len(part.whole) <= part.prepended for part in parts
    ):
        raise Damaged(f"{first.key}: parts that cannot be joined", "tensor-record")
    dim = first.prepended
    sizes_ = {part.key: part.whole[dim] for part in parts}
    starts = dict(zip(sizes_, accumulate(sizes_.values(), initial=0), strict=False))
    whole = (*first.whole[:dim], sum(sizes_.values()), *first.whole[dim + 1 :])
    return [
        replace(part, whole=whole, box=_moved(part.box, dim, starts[part.key])) for part in parts
    ]


def _moved(box: Box, dim: int, by: int) -> Box:
    lo = [start + by * (at == dim) for at, start in enumerate(box.lo)]
    return Box.at(lo, box.shape)


def sharded_records(
    value: Any, file: TorchFile, rank: int
) -> Iterator[tuple[Path, list[Sharded] | Leaf]]:
    """Yield the ShardedTensors of each place in a sharded state dict; objects as leaves."""
    for path, leaf in leaves(value, what=file.what, pickled=file.pickled):
        items = leaf if isinstance(leaf, list) else [leaf]
        records = [item for item in items if isinstance(item, Call)]
        if records and all(item.name.endswith(".ShardedTensor") for item in records):
            yield path, [_record(item, file, rank) for item in records]
        elif records and records[0].name.endswith(".ShardedObject"):
            yield path, _object(records[0])
        else:
            yield path, Leaf(path, leaf)


def _record(record: Call, file: TorchFile, rank: int) -> Sharded:
    fields = record.fields
    try:
        key, prepended = str(fields["key"]), natural(fields["prepend_axis_num"])
        dtype, whole = dtype_of(fields["dtype"]), sizes(fields["global_shape"])
        if prepended > len(whole):
            raise ValueError("more leading dims than dims")
        local = (*(1,) * prepended, *sizes(fields["local_shape"]))
        box = Box.at(sizes(fields["global_offset"]), local)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(
            f"{file.what}: not a ShardedTensor as Megatron-core writes it: {error}", "tensor-record"
        ) from None
    if fields.get("flattened_range") is not None:
        raise Damaged(
            f"{file.what}: {key} is a flattened range, which is not read from local files",
            "sharding-unknown",
        )
    tensor = plain_tensor(fields.get("data"))
    if tensor is None:
        return Sharded(key, dtype, whole, box, prepended, None)
    if (tensor.dtype, tensor.shape) != (dtype, local[prepended:]):
        raise Damaged(
            f"{file.what}: {key} is {tensor.dtype} {list(tensor.shape)}, its record says"
            f" {dtype} {list(local[prepended:])}",
            "tensor-record",
        )
    return Sharded(key, dtype, whole, box, prepended, Chunk(box, place_of(tensor, file), rank))


def _object(record: Call) -> Leaf:
    fields = record.fields
    shape, offset = (
        sizes(fields.get("global_shape") or ()),
        sizes(fields.get("global_offset") or ()),
    )
    whole = all(size == 1 for size in shape)
    key = str(fields.get("key"))
    name = key if whole else f"{key}.{'.'.join(map(str, offset))}"
    return Leaf((name,), fields.get("data"))
