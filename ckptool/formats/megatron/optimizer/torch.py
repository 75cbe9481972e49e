"""The optimizer's state in the rank folders of Megatron's own format, by parameter.

Distributed, it is in ``distrib_optim.pt``, gathered by rank 0: one run of elements for each buffer,
its buckets one after the other (``buckets_coalesced``), or one tensor a bucket before
(``get_parameter_state_dp_zero``, megatron-core 0.5 to 0.20; the optimizer
``dp_zero_gather_scatter`` of torch_dist is the same). A list holds one of these for each of several
optimizers: dense parameters first, then experts of several ranks.

Else it is numbered: ``state`` and ``fp32_from_fp16_params`` are, through the parameter groups; a
group holds its parameters in the model's order (``_get_param_groups``). Biases and 1-d parameters
have a group without weight decay; experts of several ranks, and embeddings with a learning rate of
their own, have groups of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.sharding.tensor_parallel import TpRule
from ckptool.core.views import join, narrow, whole_tensor
from ckptool.errors import Undetermined
from ckptool.formats.megatron.model import EMBEDDING, is_expert
from ckptool.formats.megatron.optimizer.buckets import (
    BucketSlot,
    cut_buckets,
    find_gaps,
    find_slots_in_run,
)
from ckptool.formats.megatron.tensor_parallel import (
    Fragments,
    LocalParameter,
    add_fragments,
)
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import (
    StoredTensor,
    locate_tensor,
    read_tensor,
    unwrap,
)
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.source import Source

_LAYOUT = ("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded")
_SHARED = (EMBEDDING, "output_layer.weight")
_MASTERS = "fp32_from_fp16_params"
_HALVES = ("bfloat16", "float16")
_MOST_BLOCKS = 100
_EMBEDDINGS = (*_SHARED, "embedding.position_embeddings.weight")


class GatheredBuffer(Struct, frozen=True):
    """One saved buffer: its parameters' element type, and the vector of each kind of state."""

    dtype: str | None
    vectors: dict[str, TensorEntry]

    @property
    def total(self) -> int:
        return max((vector.elements for vector in self.vectors.values()), default=0)


def read_buffers(file: TorchFile, rank: int) -> list[list[GatheredBuffer] | None]:
    """Return each optimizer's buffers, in order; None if another rank's file has them."""
    optimizers = file.value if isinstance(file.value, list) else [file.value]
    return [
        list(_read_optimizer(part, file, rank)) if isinstance(part, dict) else None
        for part in optimizers
    ]


def find_stray_keys(value: Any) -> list[Any]:
    """Return the keys of the file's dicts that are neither buffer numbers nor known fields."""
    optimizers = value if isinstance(value, list) else [value]
    keys = [key for part in optimizers if isinstance(part, dict) for key in part]
    return [key for key in keys if type(key) is not int and key not in _LAYOUT]


def _read_optimizer(
    optimizer: dict[Any, Any], file: TorchFile, rank: int
) -> Iterator[GatheredBuffer]:
    for number, by_dtype in optimizer.items():
        if type(number) is int and isinstance(by_dtype, dict):
            for dtypes, state in by_dtype.items():
                vectors = dict(_read_vectors(state, file, rank))
                yield GatheredBuffer(find_param_dtype(dtypes), vectors)


def find_param_dtype(dtypes: Any) -> str | None:
    """Return the parameters' element type from a buffer's key (parameters' and gradients' type)."""
    first = dtypes[0] if isinstance(dtypes, tuple) and len(dtypes) == 2 else None
    return first.name if isinstance(first, Global) else None


def _read_vectors(state: Any, file: TorchFile, rank: int) -> Iterator[tuple[str, TensorEntry]]:
    """Yield each kind of state with its vector: its tensors, one after the other."""
    for kind, value in state.items() if isinstance(state, dict) else ():
        tensors = [read_tensor(item) for item in (value if isinstance(value, list) else [value])]
        vectors = [tensor for tensor in tensors if tensor is not None and len(tensor.shape) == 1]
        if vectors and len(vectors) == len(tensors):
            yield str(kind), join([_as_entry(vector, file, rank) for vector in vectors], 0)


def _as_entry(tensor: StoredTensor, file: TorchFile, rank: int) -> TensorEntry:
    at = locate_tensor(tensor, file)
    return whole_tensor(file.what, (), tensor.dtype, tensor.shape, at, rank)


def match_buffers(
    saved: Sequence[list[GatheredBuffer] | None], expected: Sequence[list[list[LocalParameter]]]
) -> list[tuple[GatheredBuffer, list[LocalParameter]]]:
    """Return each saved buffer with its parameters; Undetermined if their numbers differ."""
    if len(saved) != len(expected) and None not in saved:
        saved = [[buffer for buffers in saved for buffer in buffers or ()]]
        expected = [[parameters for buffers in expected for parameters in buffers]]
    counts = [None if buffers is None else len(buffers) for buffers in saved]
    numbers = [len(buffers) for buffers in expected]
    if len(saved) != len(expected) or any(
        count not in (None, number) for count, number in zip(counts, numbers, strict=True)
    ):
        raise Undetermined(f"{counts} buffers, but the model has {numbers}")
    return [
        pair
        for buffers, parameters in zip(saved, expected, strict=True)
        if buffers is not None
        for pair in zip(buffers, parameters, strict=True)
    ]


def read_gathered(
    source: Source, buffers: Iterable[tuple[GatheredBuffer, Sequence[LocalParameter]]], tied: bool
) -> Fragments:
    """Return the content of buffers by parameter. Raises Undetermined if they do not fit.

    If parameters fit in several ways, the one whose padding is zero is taken: only that padding is
    read from a tensor here.
    """
    fragments: Fragments = {}
    for buffer, parameters in buffers:
        slots = _find_slots(source, buffer, parameters, tied)
        add_fragments(fragments, cut_buckets(parameters, slots, [buffer.vectors]))
    return fragments


def _find_slots(
    source: Source, buffer: GatheredBuffer, parameters: Sequence[LocalParameter], tied: bool
) -> list[BucketSlot]:
    if {vector.elements for vector in buffer.vectors.values()} != {buffer.total}:
        raise Undetermined("its states are of different lengths")
    dtype = parameters[0].dtype.name
    if buffer.dtype not in (None, dtype):
        raise Undetermined(f"a buffer of {buffer.dtype}, where the model has {dtype}")
    numels = [parameter.numel for parameter in parameters]
    shared = {at for at, parameter in enumerate(parameters) if tied and parameter.name in _SHARED}
    ways = find_slots_in_run(numels, buffer.total, shared, _find_views(parameters))
    if len(ways) > 1:
        ways = [slots for slots in ways if _has_zero_padding(source, buffer, slots)]
    if len(ways) != 1:
        raise Undetermined(
            f"a buffer of {buffer.total:,} elements, into which the {len(parameters):,} parameters"
            f" of {sum(numels):,} fit in {len(ways) or 'no'} ways"
        )
    return ways[0]


def _has_zero_padding(source: Source, buffer: GatheredBuffer, slots: Sequence[BucketSlot]) -> bool:
    return not any(
        any(_read_bytes(source, chunk, vector.dtype))
        for start, stop in find_gaps(slots)
        for vector in buffer.vectors.values()
        for chunk in narrow(vector, 0, start, stop).chunks
    )


def _read_bytes(source: Source, chunk: Chunk, dtype: DType) -> bytes:
    if not isinstance(chunk.at, Extent):
        return b""
    return source.read(chunk.at.file, chunk.at.offset, chunk.box.volume * dtype.itemsize)


def _find_views(parameters: Sequence[LocalParameter]) -> list[int | None]:
    """Return where parameters begin in the buffer, if they were saved as views of one storage."""
    views = [parameter.view for parameter in parameters]
    storages = {view[0] if view else None for view in views}
    if len(storages) != 1 or None in storages or len(parameters) == 1:
        return [None] * len(parameters)
    return [view[1] if view else None for view in views]


# Numbered


def read_numbered(
    file: TorchFile,
    value: Any,
    parameters: Sequence[LocalParameter],
    expert_parallel: bool,
    rank: int,
) -> tuple[Fragments, dict[str, TpRule]]:
    """Return one rank's optimizer state, and the rules saved with its masters.

    ``parameters`` are the rank's in the model's order. Raises Undetermined.
    """
    fragments: Fragments = {}
    rules: dict[str, TpRule] = {}
    groups = [
        group
        for optimizer in (value if isinstance(value, list) else [value])
        for group in _list_groups(optimizer)
    ]
    keys = [_read_key(group) for group, _, _ in groups]
    if len(set(keys)) != len(keys):
        raise Undetermined("two of its groups cannot be distinguished")
    for key, (group, state, masters) in zip(keys, groups, strict=True):
        members = [p for p in parameters if _find_key(p, keys, expert_parallel) == key]
        _add_group(file, rank, group, state, masters, members, fragments, rules)
    return fragments, rules


def _list_groups(optimizer: Any) -> Iterator[tuple[dict[str, Any], dict[Any, Any], list[Any]]]:
    """Yield each group with the states of all numbers, and its masters."""
    if not isinstance(optimizer, dict):
        raise Undetermined("it is not a dict")
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    masters = optimizer.get(_MASTERS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Undetermined("it holds no groups")
    if not isinstance(state, dict):
        raise Undetermined("it holds no state")
    lists = masters if isinstance(masters, list) else [[] for _ in groups]
    if len(lists) != len(groups):
        raise Undetermined(f"{len(lists)} lists of masters for {len(groups)} groups")
    for group, group_masters in zip(groups, lists, strict=True):
        yield group, state, group_masters


_GroupKey = tuple[bool, bool, bool]
"""Without weight decay, with its own learning rate, of experts of several ranks."""


def _read_key(group: Mapping[str, Any]) -> _GroupKey:
    decay = group.get("wd_mult", group.get("weight_decay", 1.0))
    return (not decay, bool(group.get("is_decoupled_lr")), bool(group.get("is_expert_parallel")))


def _find_key(
    parameter: LocalParameter, keys: Sequence[_GroupKey], expert_parallel: bool
) -> _GroupKey:
    """Return the key of the group of a parameter, among existing ones."""
    bare = {key[0] for key in keys}
    is_bare = parameter.name.endswith(".bias") or len(parameter.local) == 1
    is_decoupled = any(key[1] for key in keys) and parameter.name in _EMBEDDINGS
    expert = expert_parallel and is_expert(parameter.name)
    return (is_bare if len(bare) > 1 else min(bare), is_decoupled, expert)


def _add_group(
    file: TorchFile,
    rank: int,
    group: Mapping[str, Any],
    state: Mapping[Any, Any],
    masters: Sequence[Any],
    parameters: Sequence[LocalParameter],
    fragments: Fragments,
    rules: dict[str, TpRule],
) -> None:
    numbers = group.get("params")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise Undetermined("a group does not number its parameters")
    if len(numbers) != len(parameters):
        raise Undetermined(
            f"a group of {len(numbers):,} parameters, but the model has {len(parameters):,} for it"
        )
    halves = [parameter for parameter in parameters if parameter.dtype.name in _HALVES]
    if masters and len(masters) != len(halves):
        raise Undetermined(f"{len(masters):,} fp32 masters for {len(halves):,} 16-bit parameters")
    for parameter, master in zip(halves, masters, strict=False):
        _add_state(fragments, "fp32", parameter, read_tensor(master), file, rank)
        rule = _read_rule(master)
        if rule is not None:
            rules[parameter.name] = rule
    for number, parameter in zip(numbers, parameters, strict=True):
        values = state.get(number)
        for kind, value in values.items() if isinstance(values, dict) else ():
            tensor = read_tensor(value)
            if tensor is not None:
                scalar = parameter if tensor.shape else replace(parameter, local=())
                _add_state(fragments, str(kind), scalar, tensor, file, rank)


def _add_state(
    fragments: Fragments,
    kind: str,
    parameter: LocalParameter,
    tensor: StoredTensor | None,
    file: TorchFile,
    rank: int,
) -> None:
    if tensor is None or math.prod(tensor.shape) != parameter.numel:
        shape = list(tensor.shape) if tensor else "no tensor"
        raise Undetermined(
            f"{kind} of {parameter.name} is {shape}, the parameter {list(parameter.local)}"
        )
    shard = parameter, _as_entry(tensor, file, rank)
    fragments.setdefault((kind, parameter.name), []).append(shard)


def _read_rule(value: Any) -> TpRule | None:
    """Return the rule that was saved with a master, as attributes of the tensor.

    Models built without initialization lack true attributes, so that False is not evidence.
    """
    value = unwrap(value)
    if not isinstance(value, Call) or len(value.args) != 4 or not isinstance(value.args[3], dict):
        return None
    attributes = value.args[3]
    dim, stride = attributes.get("partition_dim"), attributes.get("partition_stride")
    if attributes.get("tensor_model_parallel") is not True:
        return None
    if type(dim) is int and type(stride) is int and 0 <= dim < 8 and 0 < stride < _MOST_BLOCKS:
        return TpRule(dim, (1,) * stride)
    return None
