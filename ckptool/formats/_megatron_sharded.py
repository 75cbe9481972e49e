"""Megatron-core's records of what a rank holds: ``ShardedTensor`` and ``ShardedObject``.

Local checkpoints are pickles of them (megatron-core 0.11 to 0.20, ``dist_checkpointing``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path
from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Problem
from ckptool.formats._leaves import Leaf
from ckptool.formats._pickle import Call
from ckptool.formats._storage import dtype_of, natural, place_of, plain_tensor, sizes
from ckptool.formats._torch_file import TorchFile
from ckptool.formats._tree import leaves


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
        raise Damaged(Problem(f"{first.key}: parts that cannot be joined", "tensor-record"))
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
    """The ShardedTensors of each place in a sharded state dict; objects as leaves."""
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
            Problem(
                f"{file.what}: not a ShardedTensor as Megatron-core writes it: {error}",
                "tensor-record",
            )
        ) from None
    if fields.get("flattened_range") is not None:
        raise Damaged(
            Problem(
                f"{file.what}: {key} is a flattened range, which is not read from local files",
                "sharding-unknown",
            )
        )
    tensor = plain_tensor(fields.get("data"))
    if tensor is None:
        return Sharded(key, dtype, whole, box, prepended, None)
    if (tensor.dtype, tensor.shape) != (dtype, local[prepended:]):
        raise Damaged(
            Problem(
                f"{file.what}: {key} is {tensor.dtype} {list(tensor.shape)}, its record says"
                f" {dtype} {list(local[prepended:])}",
                "tensor-record",
            )
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
