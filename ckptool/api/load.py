"""Fill a state dict in place: each rank reads its own boxes, from any format."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from msgspec import Struct

from ckptool.api.arguments import AnyPath, Keywords, with_keywords
from ckptool.api.checkpoint import Checkpoint, checkpoint_at
from ckptool.api.keywords import OpenKeywords
from ckptool.api.state_dict import (
    NameMatch,
    StateLeaf,
    flattened,
    keys_differ,
    leaves_of,
    match_names,
)
from ckptool.api.tensors import (
    Staging,
    bits_of,
    declared_boxes,
    find_obstacle,
    global_shape,
    local_parts,
    local_tensors,
    why_not_filled,
)
from ckptool.api.values import rebuild
from ckptool.commands.open import no_collecting
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.state_category import state_category
from ckptool.core.text import list_first
from ckptool.engine.read.gather import raw, unit
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.tensors import FillRequest
from ckptool.errors import Unsupported

if TYPE_CHECKING:
    import torch


class LoadReport(Struct, frozen=True):
    """What was loaded; ``nbytes`` counts the loaded bytes of this rank's tensors.

    ``missing`` are names of the state dict that the checkpoint lacks, ``unexpected`` those of the
    checkpoint that the state dict lacks; both are empty unless ``strict=False``.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nbytes: int

    def __repr__(self) -> str:
        counts = (f"{len(getattr(self, n)):,} {n}" for n in ("loaded", "missing", "unexpected"))
        return f"<ckptool.LoadReport: {', '.join(counts)}, {self.nbytes:,} bytes>"


@with_keywords(OpenKeywords)
def load(
    path: AnyPath | Checkpoint,
    state_dict: dict[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
    workers: int | None = None,
    **options: Unpack[OpenKeywords],
) -> LoadReport:
    """Fill ``state_dict`` in place from the checkpoint at ``path``, whatever its format and mesh.

    Tensors and DTensors are filled in place, on the CPU or on a device; of a DTensor (or FSDP1's
    ShardedTensor, or torch 2.15's CheckpointableTensor) each rank reads its own boxes, and ranks
    need not be synchronized. Other values are replaced. Names in a nested state dict are its keys
    joined by dots, as in DCP. A tied parameter is loaded under any of its names. ``cast`` casts
    floating tensors to the types in the state dict. These keywords make the checkpoint match the
    state dict: ``model_only=True``, ``rename=[...]``, ``map="auto"``, ``dequantize=True``.

    Before anything is written, raises KeysDiffer if names differ and ``strict``, Unsupported if
    shapes, element types or kinds differ. Later raises Damaged if the source's bytes are not as
    written, Unsupported if tied parameters differ in it; what was filled by then stays.
    """
    with no_collecting():
        Keywords("load", options, OpenKeywords)
        leaves = leaves_of(state_dict)
        checkpoint = checkpoint_at(path, **options)
        matched = _with_tied(match_names(checkpoint, leaves), leaves)
        if strict and (matched.missing or matched.unexpected):
            raise keys_differ(checkpoint, matched, "strict=False")
        objects = flattened(checkpoint, leaves).objects
        stored = (name for name in matched.both if name in objects or checkpoint.has(name))
        leaves = {name: leaves[name] for name in stored}
        values = {name: rebuild(entry) for name, entry in objects.items() if name in leaves}
        entries = {
            name: checkpoint.entry(name, dtype_of(leaf.value) if cast else None)
            for name, leaf in leaves.items()
            if name not in values
        }
        _require_alike(checkpoint, entries, leaves)
        targets = [
            Target(entry, box, memory)
            for name, entry in entries.items()
            for box, memory in local_parts(leaves[name].value)
        ]
    fill_targets(checkpoint, targets, workers)
    for name, value in values.items():
        leaves[name].replace(value)
    nbytes = sum(target.box.volume * target.entry.dtype.itemsize for target in targets)
    return LoadReport(*matched, nbytes)


def _with_tied(matched: NameMatch, leaves: Mapping[str, StateLeaf]) -> NameMatch:
    """Count as loaded names that only the state dict has, if another name loads their memory."""
    if not matched.missing:
        return matched
    loaded = {_memory(leaves[name].value) for name in matched.both} - {None}
    missing = {n: None for n in matched.missing if _memory(leaves[n].value) not in loaded}
    both = tuple(name for name in leaves if name not in missing)
    return NameMatch(both, tuple(missing), matched.unexpected)


def _memory(value: Any) -> tuple[Any, ...] | None:
    """Return a tensor's memory and its part of the global tensor; None if it cannot be filled."""
    import torch

    if not isinstance(value, torch.Tensor) or find_obstacle(value) is not None:
        return None
    local = local_tensors(value)
    if any(map(why_not_filled, local)):
        return None
    return (global_shape(value), declared_boxes(value), *map(_memory_of, local))


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, such as tied parameters."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


# What cannot be filled


def _require_alike(
    checkpoint: Checkpoint, entries: Mapping[str, TensorEntry], leaves: Mapping[str, StateLeaf]
) -> None:
    """Raise Unsupported if the checkpoint's content does not fit the state dict."""
    import torch

    values = {name: leaf for name, leaf in leaves.items() if name not in entries}
    problems = [
        _Mismatch(f"{name}: a value in the checkpoint, a tensor in the state dict")
        for name, leaf in values.items()
        if isinstance(leaf.value, torch.Tensor)
    ]
    problems += [
        _Mismatch(f"{name}: a value in a tuple, which cannot be replaced", "make it a list")
        for name, leaf in values.items()
        if leaf.is_fixed
    ]
    mismatches = (_mismatch(entry, leaves[name].value) for name, entry in entries.items())
    problems += filter(None, mismatches)
    if problems:
        lines = list_first([problem.message for problem in problems])
        raise Unsupported(
            f"{checkpoint.path} cannot fill the state dict:\n  " + "\n  ".join(lines),
            hint=next((problem.hint for problem in problems if problem.hint), None),
        )


class _Mismatch(Struct, frozen=True):
    message: str
    hint: str | None = None


def _mismatch(entry: TensorEntry, tensor: Any) -> _Mismatch | None:
    """Return why the tensor cannot hold the entry, naming both sides; None if it can."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        return _Mismatch(f"{entry.name}: a tensor in the checkpoint, a {kind} in the state dict")
    obstacle = find_obstacle(tensor)
    if obstacle is not None:
        return _Mismatch(f"{entry.name}: {obstacle}")
    shape, dtype = global_shape(tensor), str(tensor.dtype).removeprefix("torch.")
    if (shape, dtype) != (entry.shape, entry.dtype.name):
        sides = f"{entry.dtype} {list(entry.shape)} in the checkpoint, {dtype} {list(shape)}"
        hint = cast_hint(entry, dtype) if shape == entry.shape else None
        return _Mismatch(f"{entry.name}: {sides} in the state dict", hint)
    obstacle = next(filter(None, map(why_not_filled, local_tensors(tensor))), None)
    return _Mismatch(f"{entry.name}: {obstacle}") if obstacle else None


def dtype_of(value: Any) -> DType | None:
    """Return the element type of a tensor; None of other values and of types unknown here."""
    return BY_NAME.get(str(getattr(value, "dtype", "")).removeprefix("torch."))


def cast_hint(entry: TensorEntry, dtype: str) -> str:
    """Return what to do where the state dict has another element type."""
    source, target = entry.dtype, BY_NAME.get(dtype)
    if target is None or {source.kind, target.kind} != {"float"}:
        return "nothing is cast silently"
    if not entry.shape and state_category(entry) != "model":
        return "tensors without dims outside the model, such as step counters, are never cast"
    if source.itemsize == 1:
        return "dequantize=True dequantizes quantized tensors, cast=True casts others"
    return "nothing is cast silently: use cast=True"


# Filling


class Target(Struct, frozen=True):
    """``box`` of a tensor of the checkpoint goes into ``tensor``, which has its shape and type."""

    entry: TensorEntry
    box: Box
    tensor: torch.Tensor


def fill_targets(
    checkpoint: Checkpoint, targets: Sequence[Target], workers: int | None = None
) -> None:
    """Read every box into its tensor, done when it returns.

    Of several boxes for the same memory one is read into it and the others are compared with it; so
    are all whose memory may be another's in part, once all is read. Raises Unsupported if they
    are not the same, Changed if the checkpoint did not stay as it was, else as
    ``Checkpoint.fill`` does.
    """
    staging = Staging()
    first: dict[tuple[Any, ...], Target] = {}
    tied: list[tuple[Target, Target]] = []
    with no_collecting():
        for target in targets:
            filled = first.setdefault(_memory_of(target.tensor), target)
            if (filled.entry.chunks, filled.box) != (target.entry.chunks, target.box):
                tied.append((filled, target))
        requests = [FillRequest(t.entry, t.box, staging.memory(t.tensor)) for t in first.values()]
    try:
        checkpoint.fill(requests, workers)
    finally:
        staging.finish()
    _require_same(checkpoint, [*tied, *_find_overlaps(first)], workers)
    checkpoint.require_unchanged()


def _find_overlaps(targets: Mapping[tuple[Any, ...], Target]) -> Iterator[tuple[Target, Target]]:
    """Yield each target, by its ``_memory_of``, behind one of another tensor that it may overlap.

    Views that interleave, and share no element, are among them.
    """
    spans: list[tuple[int, int, int, Target]] = []
    for (storage, offset, dtype, shape, strides), target in targets.items():
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if 0 not in shape:
            size = dtype.itemsize
            spans.append((storage, offset * size, (offset + last + 1) * size, target))
    groups: list[list[Target]] = []
    where, end = None, 0
    for storage, start, stop, target in sorted(spans, key=lambda span: span[:3]):
        if storage != where or start >= end:
            groups.append([])
            where, end = storage, stop
        groups[-1].append(target)
        end = max(end, stop)
    for group in filter(lambda group: len(group) > 1, groups):
        for target in group:
            neighbors = (other for other in group if other.entry.name != target.entry.name)
            if (other := next(neighbors, None)) is not None:
                yield other, target


def _require_same(
    checkpoint: Checkpoint, pairs: Sequence[tuple[Target, Target]], workers: int | None
) -> None:
    """Raise Unsupported if boxes for the same memory are not the same; neither is kept."""
    memories = [_ComparedMemory(target.tensor) for _, target in pairs]
    requests = [FillRequest(t.entry, t.box, m) for (_, t), m in zip(pairs, memories, strict=True)]
    checkpoint.fill(requests, workers)
    for (first, target), memory in zip(pairs, memories, strict=True):
        if memory.differs.is_set():
            raise Unsupported(
                f"{first.entry.name} and {target.entry.name} share memory in the state dict"
                " but differ in the checkpoint",
                hint=f"untie them, or drop={[target.entry.name]}",
            )


class _ComparedMemory:
    """Memory that what is read is compared with."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.differs = threading.Event()

    @contextmanager
    def part(self, where: Box) -> Iterator[Array]:
        """Yield an array of its own, which is compared at the end."""
        read: Array = np.empty(where.shape, unit(self._tensor.element_size()))
        yield read
        filled = bits_of(self._tensor[tuple(map(slice, where.lo, where.hi))].cpu())
        if raw(read) != raw(np.ascontiguousarray(filled)):
            self.differs.set()
