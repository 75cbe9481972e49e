"""Fill a state dict in place: each rank reads its own boxes, from any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from ckptool.api.commands import no_collecting
from ckptool.api.fill import Target, fill_targets, memory_of
from ckptool.api.keywords import Opening
from ckptool.api.local import declared_boxes, global_shape, local_parts, local_tensors, why_not_held
from ckptool.api.open import Checkpoint, checkpoint_at
from ckptool.api.options import AnyPath, Keywords, documented
from ckptool.api.staging import why_not_filled
from ckptool.api.state_dict import Leaf, Matched, keys_differ, leaves_of, listed, matched
from ckptool.api.values import rebuilt
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.state_category import state_category
from ckptool.errors import Unsupported


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What was loaded. ``nbytes`` is what this rank's tensors hold of it.

    ``missing`` are names of the state dict that the checkpoint does not have, ``unexpected`` those
    of the checkpoint that the state dict does not have; both empty unless ``strict=False``.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nbytes: int

    def __repr__(self) -> str:
        counts = (f"{len(getattr(self, n)):,} {n}" for n in ("loaded", "missing", "unexpected"))
        return f"<ckptool.LoadReport: {', '.join(counts)}, {self.nbytes:,} bytes>"


@documented(Opening)
def load(
    path: AnyPath | Checkpoint,
    state_dict: dict[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
    workers: int | None = None,
    **options: Unpack[Opening],
) -> LoadReport:
    """Fill ``state_dict`` in place from the checkpoint at ``path``, whatever its format and mesh.

    Tensors and DTensors are filled where they lie, on the CPU or on a device; of a DTensor (or
    FSDP1's ShardedTensor, or torch 2.15's CheckpointableTensor) each rank reads its own boxes, and
    the ranks need not meet. Other values are replaced. A nested state dict has the names that DCP
    gives it, its keys joined by dots. A tied parameter is loaded under any of its names. ``cast``
    makes floating tensors those of the state dict's types. The keywords fit the checkpoint to the
    state dict: ``model_only=True``, ``rename=[...]``, ``map="auto"``, ``dequantize=True``.

    Raises KeysDiffer where names differ and ``strict``, Unsupported where shapes, element types or
    kinds do, before anything is written; Damaged where the source's bytes are not as they were
    written, Unsupported where tied parameters are not the same in it: what was filled then stays.
    """
    with no_collecting():
        Keywords("load", options, Opening)
        items = leaves_of(state_dict)
        checkpoint = checkpoint_at(path, **options)
        found = _with_tied(matched(checkpoint, items), items)
        if strict and (found.missing or found.unexpected):
            raise keys_differ(checkpoint, found)
        held = {name: items[name] for name in found.both if checkpoint.has(name)}
        values = {n: rebuilt(entry) for n, entry in checkpoint.catalog.objects.items() if n in held}
        entries = {
            name: checkpoint.entry(name, dtype_of(leaf.value) if cast else None)
            for name, leaf in held.items()
            if name not in values
        }
        _require_alike(checkpoint, entries, held)
        targets = [
            Target(entry, box, memory)
            for name, entry in entries.items()
            for box, memory in local_parts(held[name].value)
        ]
    fill_targets(checkpoint, targets, workers)
    for name, value in values.items():
        held[name].replace(value)
    nbytes = sum(one.box.volume * one.entry.dtype.itemsize for one in targets)
    return LoadReport(*found, nbytes)


def _with_tied(found: Matched, items: Mapping[str, Leaf]) -> Matched:
    """With names as loaded that only the state dict has, where another name loads their memory."""
    if not found.missing:
        return found
    loaded = {_memory(items[name].value) for name in found.both} - {None}
    missing = {n: None for n in found.missing if _memory(items[n].value) not in loaded}
    both = tuple(name for name in items if name not in missing)
    return Matched(both, tuple(missing), found.unexpected)


def _memory(value: Any) -> tuple[Any, ...] | None:
    """What tells a tensor's memory and which part of the whole it is; None of what has none."""
    import torch

    if not isinstance(value, torch.Tensor) or why_not_held(value) is not None:
        return None
    local = local_tensors(value)
    if any(map(why_not_filled, local)):
        return None
    return (global_shape(value), declared_boxes(value), *map(memory_of, local))


def _require_alike(
    checkpoint: Checkpoint, entries: Mapping[str, TensorEntry], items: Mapping[str, Leaf]
) -> None:
    """Unsupported where what the state dict has cannot be filled with what the checkpoint has."""
    import torch

    values = {name: leaf for name, leaf in items.items() if name not in entries}
    problems = [
        _Problem(f"{name}: a value in the checkpoint, a tensor in the state dict")
        for name, leaf in values.items()
        if isinstance(leaf.value, torch.Tensor)
    ]
    problems += [
        _Problem(f"{name}: a value in a tuple, which cannot be replaced", "make it a list")
        for name, leaf in values.items()
        if leaf.is_fixed
    ]
    problems += [why for n, entry in entries.items() if (why := _why_not(entry, items[n].value))]
    if problems:
        lines = listed([problem.message for problem in problems])
        raise Unsupported(
            f"{checkpoint.path} cannot fill the state dict:\n  " + "\n  ".join(lines),
            hint=next((one.hint for one in problems if one.hint), None),
        )


class _Problem(NamedTuple):
    message: str
    hint: str | None = None


def _why_not(entry: TensorEntry, tensor: Any) -> _Problem | None:
    """Why the tensor cannot hold the entry, with both of what differs; None where it can."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        return _Problem(f"{entry.name}: a tensor in the checkpoint, a {kind} in the state dict")
    why = why_not_held(tensor)
    if why is not None:
        return _Problem(f"{entry.name}: {why}")
    shape, dtype = global_shape(tensor), str(tensor.dtype).removeprefix("torch.")
    if (shape, dtype) != (entry.shape, entry.dtype.name):
        there, here = f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}"
        message = f"{entry.name}: {there} in the checkpoint, {here} in the state dict"
        return _Problem(message, cast_hint(entry, dtype) if shape == entry.shape else None)
    why = next(filter(None, map(why_not_filled, local_tensors(tensor))), None)
    return _Problem(f"{entry.name}: {why}") if why else None


def dtype_of(value: Any) -> DType | None:
    """The element type of a tensor; None of what is none, or of a type of its own."""
    return BY_NAME.get(str(getattr(value, "dtype", "")).removeprefix("torch."))


def cast_hint(entry: TensorEntry, wanted: str) -> str:
    """What to say where the state dict has another element type."""
    there, here = entry.dtype, BY_NAME.get(wanted)
    if here is None or {there.kind, here.kind} != {"float"}:
        return "nothing is cast in silence"
    if not entry.shape and state_category(entry) != "model":
        return "what has no dims and is none of the model, such as a step counter, is never cast"
    if there.itemsize == 1:
        return "dequantize=True makes numbers of quantised tensors, cast=True casts others"
    return "nothing is cast in silence: cast=True casts"
