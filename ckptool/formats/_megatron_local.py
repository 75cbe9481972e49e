"""Megatron-core's state dict in a local checkpoint: ``MCoreTensorAwareStateDict``.

Every tensor is a ``ShardedTensor`` record under its module's own name: its key, the shape of the
whole tensor, and where the rank's part lies in it. With ``fully_parallel`` a rank has no data for
the parts that its data-parallel partners hold (megatron-core 0.11 to 0.20).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Path, TensorEntry, flat_name, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.tp_rules import Fit
from ckptool.errors import Damaged, Problem
from ckptool.formats._assemble import assemble
from ckptool.formats._leaves import Assembled, Leaf, read_leaves
from ckptool.formats._megatron_buckets import Group, bucket_state, buckets_among
from ckptool.formats._megatron_distrib import expected_buffers
from ckptool.formats._megatron_names import global_expert, global_layer, is_buffer, is_expert
from ckptool.formats._megatron_padding import is_bucket
from ckptool.formats._megatron_params import Found, Held, put_together
from ckptool.formats._megatron_sharded import Sharded, sharded_records, side_by_side
from ckptool.formats._megatron_state import Unnamed
from ckptool.formats._pickle import Call
from ckptool.formats._torch_file import TorchFile
from ckptool.formats.base import Source

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
    runs: dict[Group, list[list[Held]]] = field(default_factory=dict)
    fits: dict[tuple[str, tuple[int, ...]], Fit] = field(default_factory=dict)
    others: dict[int, dict[str, Leaf]] = field(default_factory=dict)


def read_megatron(
    source: Source, files: Mapping[int, TorchFile], expert_parallel: bool
) -> tuple[Assembled, str]:
    """The tensors ``model.<name>``, ``fp32.<name>``, ... and values of all ranks' files.

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
    except Unnamed as error:
        state, reason = tensors, str(error)
    found.tensors = model | state | found.tensors
    return found, reason


def _path(name: str) -> Path:
    head, _, rest = name.partition(".")
    return (head, rest) if head == "model" else (name,)


def _state(tensors: Mapping[str, TensorEntry], ranks: _Ranks) -> dict[str, TensorEntry]:
    """The optimizer's state by parameter. Raises Unnamed."""
    found: Found = {}
    for group, buffers in buckets_among(tensors.values()).items():
        if group not in ranks.runs:
            raise Unnamed(f"no rank's model goes with the buckets of group {group[1]}")
        expected = expected_buffers(ranks.runs[group], expert_parallel=False)[0]
        for path, parts in bucket_state(buffers, expected).items():
            found.setdefault(path, []).extend(parts)
    whole = put_together(lambda held: ranks.fits[held.name, held.rank], found)
    if whole.conflicts:
        raise Unnamed(next(iter(whole.conflicts.values())))
    return whole.tensors


def _read_rank(
    source: Source, rank: int, file: TorchFile, ranks: _Ranks, expert_parallel: bool
) -> None:
    fields = file.inert.fields if isinstance(file.inert, Call) else {}
    runs: dict[str, list[Held]] = {}
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
            Problem(
                f"{name}: ranks hold it as {known[0]} {list(known[1])} and {dtype} {list(whole)}",
                "ranks-disagree",
            )
        )
    chunks = ranks.chunks.setdefault(name, [])
    if chunk is not None:
        chunks.append(chunk)


def _parameter(path: Path, parts: Sequence[Sharded], rank: int, ranks: _Ranks) -> Held:
    """A parameter of the rank's model; one of several parts is joined along its first dim."""
    parts = side_by_side(parts)
    first = parts[0]
    name = _whole_name(flat_name(path[1:2]), first)
    pieces, local = _joined(parts)
    whole = first.whole[first.prepended :]
    held = Held(name, (rank, 0, 0), rank, local, first.dtype)
    ranks.fits[name, held.rank] = Fit(local, whole, pieces)
    for part in parts:
        chunk = part.chunk
        inner = Box(part.box.lo[part.prepended :], part.box.hi[part.prepended :])
        placed = Chunk(inner, chunk.at, chunk.rank) if chunk else None
        _add(ranks, f"model.{name}", first.dtype, whole, placed)
    return held


def _joined(parts: Sequence[Sharded]) -> tuple[tuple[tuple[Box, Box], ...], tuple[int, ...]]:
    """The parts' boxes in the rank's tensor and in the whole one, and the rank's shape."""
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
