"""Megatron-core's state dict in a local checkpoint: ``MCoreTensorAwareStateDict``.

Every tensor is a ``ShardedTensor`` record under its module's own name: its key, the shape of the
whole tensor, and where the rank's part lies in it; other values are ``ShardedObject`` records. With
``fully_parallel`` a rank has no data for the parts that its data-parallel partners hold
(megatron-core 0.11 to 0.20, ``dist_checkpointing``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box, Piece
from ckptool.core.catalog import Chunk, Path, TensorEntry, flat_name, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import Fit
from ckptool.errors import Damaged, Undetermined, naming
from ckptool.formats.megatron.model import EMBEDDING, is_buffer, number_expert, number_layer
from ckptool.formats.megatron.optimizer.buckets import (
    Group,
    find_bucket_group,
    group_buckets,
    group_parameters,
    read_buckets,
)
from ckptool.formats.megatron.tensor_parallel import (
    Fragments,
    LocalParameter,
    add_fragments,
    merge_fragments,
)
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import (
    locate_tensor,
    read_dtype,
    read_natural,
    read_sizes,
    read_tensor,
)
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, read_leaves
from ckptool.serialization.state_dict.tree import StateDictWalk

ROOT = "MCoreTensorAwareStateDict"
_MODEL = re.compile(r"model[0-9]{0,4}")
_NUMBERED = re.compile(r"\blayers\.[0-9]")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)([0-9]{1,9})")
_LOCAL_EXPERT = re.compile(r"(local_experts\.)[0-9]+|(linear_fc[12]\.(?:weight|bias))[0-9]+$")
_STACKED_EXPERTS = ".experts.experts."


class _ShardedRanks(Struct):
    """The joint content of all ranks' files.

    ``kinds`` are the types and shapes of whole tensors, ``buffers`` each group's parameters,
    ``leaves`` the other values by rank.
    """

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    kinds: dict[str, tuple[DType, tuple[int, ...]]] = field(default_factory=dict)
    buffers: dict[Group, list[list[LocalParameter]]] = field(default_factory=dict)
    leaves: dict[int, dict[str, Leaf]] = field(default_factory=dict)

    def add(self, name: str, dtype: DType, whole: tuple[int, ...], chunk: Chunk | None) -> None:
        """Add what a rank has of a tensor. Damaged if others have another type or shape."""
        kind = self.kinds.setdefault(name, (dtype, whole))
        if kind != (dtype, whole):
            raise Damaged(
                f"{name}: ranks hold it as {kind[0]} {list(kind[1])} and {dtype} {list(whole)}",
                "ranks-disagree",
            )
        self.chunks.setdefault(name, []).extend([chunk] if chunk is not None else [])


def read_megatron(
    source: Source, files: Mapping[int, TorchFile], expert_parallel: bool
) -> tuple[Assembled, str]:
    """Return all ranks' tensors and values, and why the optimizer's state has no names, if so."""
    ranks = _ShardedRanks()
    for rank, file in files.items():
        with naming(file.what):
            _read_rank(source, rank, file, ranks, expert_parallel)
    tensors = {}
    for name, chunks in ranks.chunks.items():
        path = name.split(".", 1) if name.startswith("model.") else [name]
        tensors[name] = TensorEntry(name, tuple(path), *ranks.kinds[name], merge_copies(chunks))
    assembled = assemble(ranks.leaves)
    model = {name: entry for name, entry in tensors.items() if find_bucket_group(name) is None}
    try:
        state, reason = _name_state(tensors, ranks), ""
    except Undetermined as error:
        state, reason = tensors, str(error)
    assembled.tensors = model | state | assembled.tensors
    return assembled, reason


def read_state_fields(file: TorchFile) -> Mapping[str, Any]:
    """Return the attributes of the tensor-aware state dict that a file holds."""
    return file.inert.fields if isinstance(file.inert, Call) else {}


def _name_state(tensors: Mapping[str, TensorEntry], ranks: _ShardedRanks) -> dict[str, TensorEntry]:
    """Return the optimizer's state by parameter. Raises Undetermined."""
    fragments: Fragments = {}
    for group, buckets in group_buckets(tensors.values()).items():
        if group not in ranks.buffers:
            raise Undetermined(f"no rank's model matches the buckets of group {group[1]}")
        add_fragments(fragments, read_buckets(buckets, ranks.buffers[group]))
    state, conflicts = merge_fragments(attrgetter("fit"), fragments)
    if conflicts:
        raise Undetermined(next(iter(conflicts.values())))
    return state


def _read_rank(
    source: Source, rank: int, file: TorchFile, ranks: _ShardedRanks, expert_parallel: bool
) -> None:
    fields = read_state_fields(file)
    runs: dict[str, list[LocalParameter]] = {}
    groups: set[Group] = set()
    leaves = ranks.leaves.setdefault(rank, {})
    for path, parts in read_records(fields.get("sharded_state_dict"), file, rank):
        if isinstance(parts, Leaf):
            inner = file.narrowed(parts.value)
            leaves |= read_leaves(inner, source, prefix=parts.path, rank_state=True)
        elif _MODEL.fullmatch(str(path[0])):
            parameter = _read_parameter(path, parts, rank, ranks)
            if not is_buffer(parameter.name):
                runs.setdefault(str(path[0]), []).append(parameter)
        else:
            for part in parts:
                ranks.add(part.key, part.dtype, part.whole, part.chunk)
                group = find_bucket_group(part.key)
                groups |= {group} if group and len(part.whole) == 1 else set()
    leaves |= read_leaves(file.narrowed(fields.get("common")), source)
    for group in groups:
        ranks.buffers[group] = group_parameters(
            runs.values(), experts=group[0] > 0, expert_parallel=expert_parallel
        )


def _read_parameter(
    path: Path, parts: Sequence[ShardRecord], rank: int, ranks: _ShardedRanks
) -> LocalParameter:
    """Return a parameter of the rank's model; several parts are joined along its first dim."""
    parts = join_parts(parts)
    first = parts[0]
    name = _name_globally(flat_name(path[1:2]), first)
    boxes = [Box(p.box.lo[p.prepended :], p.box.hi[p.prepended :]) for p in parts]
    pieces, local = _join_boxes(boxes)
    whole = first.whole[first.prepended :]
    for part, box in zip(parts, boxes, strict=True):
        placed = replace(part.chunk, box=box) if part.chunk else None
        ranks.add(f"model.{name}", first.dtype, whole, placed)
    fit = Fit(local, whole, pieces)
    return LocalParameter(name, (rank, 0, 0), local, first.dtype, fit=fit)


def _join_boxes(boxes: Sequence[Box]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Return parts' boxes in the whole tensor and in the rank's, and the rank's shape."""
    if len(boxes) == 1:
        shape = boxes[0].shape
        return (Piece(boxes[0], Box.whole(shape)),), shape
    pieces, start = [], 0
    for box in boxes:
        pieces.append(Piece(box, Box.along(0, start, box.shape)))
        start += box.shape[0]
    return tuple(pieces), (start, *boxes[0].shape[1:])


def _name_globally(name: str, part: ShardRecord) -> str:
    """Return a name with the whole model's numbers of layer and expert, by the stacked dims.

    The last stage's copy of a tied embedding has the embedding's name.
    """
    if part.key.endswith(EMBEDDING):
        return part.key
    offsets = list(part.box.lo[: part.prepended])
    layer = _LAYER.match(name)
    if offsets and layer and not _NUMBERED.search(part.key):
        name = number_layer(name, {layer[1]: offsets.pop(0) - int(layer[2])})
    if offsets and _STACKED_EXPERTS in f".{part.key}":
        return number_expert(_LOCAL_EXPERT.sub(r"\g<1>\g<2>0", name), offsets.pop(0))
    return name


class ShardRecord(Struct, frozen=True):
    """One ``ShardedTensor`` record: a rank's part of the tensor ``key``; its data if it has any.

    ``whole`` and ``box`` have ``prepended`` dims more than the rank's tensor.
    """

    key: str
    dtype: DType
    whole: tuple[int, ...]
    box: Box
    prepended: int
    chunk: Chunk | None


def join_parts(parts: Sequence[ShardRecord]) -> Sequence[ShardRecord]:
    """Turn parts of several tensors into parts of one, which concatenates the tensors.

    So z, x, B, C and dt are kept apart that are one ``in_proj`` of Mamba's in the rank's model.
    Raises Damaged if their dims differ.
    """
    if len(parts) == 1:
        return parts
    first = parts[0]
    if any(
        len(part.whole) != len(first.whole) or len(part.whole) <= part.prepended for part in parts
    ):
        raise Damaged(f"{first.key}: parts that cannot be joined", "tensor-record")
    dim = first.prepended
    lengths = {part.key: part.whole[dim] for part in parts}
    starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
    whole = (*first.whole[:dim], sum(lengths.values()), *first.whole[dim + 1 :])
    moved = []
    for part in parts:
        lo = list(part.box.lo)
        lo[dim] += starts[part.key]
        moved.append(replace(part, whole=whole, box=Box.at(lo, part.box.shape)))
    return moved


def read_records(
    value: Any, file: TorchFile, rank: int
) -> Iterator[tuple[Path, list[ShardRecord] | Leaf]]:
    """Yield the ShardedTensors of each place in a sharded state dict; objects as leaves."""
    for path, leaf in StateDictWalk(file.what, file.pickled).leaves(value):
        items = leaf if isinstance(leaf, list) else [leaf]
        records = [item for item in items if isinstance(item, Call)]
        if records and all(item.name.endswith(".ShardedTensor") for item in records):
            yield path, [_read_record(item, file, rank) for item in records]
        elif records and records[0].name.endswith(".ShardedObject"):
            yield path, _read_object(records[0])
        else:
            yield path, Leaf(path, leaf)


def _read_record(record: Call, file: TorchFile, rank: int) -> ShardRecord:
    fields = record.fields
    try:
        key, prepended = str(fields["key"]), read_natural(fields["prepend_axis_num"])
        dtype, whole = read_dtype(fields["dtype"]), read_sizes(fields["global_shape"])
        if prepended > len(whole):
            raise ValueError("more leading dims than dims")
        local = (*(1,) * prepended, *read_sizes(fields["local_shape"]))
        box = Box.at(read_sizes(fields["global_offset"]), local)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(
            f"{file.what}: not a ShardedTensor as Megatron-core writes it: {error}", "tensor-record"
        ) from None
    if fields.get("flattened_range") is not None:
        raise Damaged(
            f"{file.what}: {key} is a flattened range, which is not read from local files",
            "sharding-unknown",
        )
    tensor = read_tensor(fields.get("data"))
    if tensor is None:
        return ShardRecord(key, dtype, whole, box, prepended, None)
    if (tensor.dtype, tensor.shape) != (dtype, local[prepended:]):
        raise Damaged(
            f"{file.what}: {key} is {tensor.dtype} {list(tensor.shape)}, its record says"
            f" {dtype} {list(local[prepended:])}",
            "tensor-record",
        )
    return ShardRecord(
        key, dtype, whole, box, prepended, Chunk(box, locate_tensor(tensor, file), rank)
    )


def _read_object(record: Call) -> Leaf:
    fields = record.fields
    shape = read_sizes(fields.get("global_shape") or ())
    offset = read_sizes(fields.get("global_offset") or ())
    key = str(fields.get("key"))
    is_whole = all(size == 1 for size in shape)
    name = key if is_whole else f"{key}.{'.'.join(map(str, offset))}"
    return Leaf((name,), fields.get("data"))
