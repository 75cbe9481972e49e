"""Fill a state dict in place: each rank reads its own boxes, from any format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.checkpoint import Checkpoint, checkpoint_at
from ckptool.api.keywords import AnyPath, Opening
from ckptool.api.local import local_pieces, local_tensor, why_not_held
from ckptool.api.memory import Staging, why_not_filled
from ckptool.api.signature import documented
from ckptool.api.values import rebuilt
from ckptool.core.catalog import TensorEntry
from ckptool.engine.boxes import Wanted
from ckptool.errors import CannotDo

if TYPE_CHECKING:
    import torch

_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded. ``nbytes`` is what this rank's tensors hold of it.

    ``missing`` are names of the state dict that the checkpoint does not have, ``unexpected`` those
    of the checkpoint that the state dict does not have; both empty unless ``strict=False``.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nbytes: int


class KeysDiffer(CannotDo):
    """The state dict and the checkpoint do not have the same names.

    ``missing`` are those that only the state dict has, ``unexpected`` those that only the
    checkpoint has.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@documented(Opening)
def load(
    path: AnyPath | Checkpoint,
    state_dict: dict[str, Any],
    *,
    strict: bool = True,
    workers: int | None = None,
    **options: Unpack[Opening],
) -> LoadReport:
    """Fill ``state_dict`` in place from the checkpoint at ``path``, whatever its format and mesh.

    Tensors and DTensors are filled where they lie, on the CPU or on a device; of a DTensor each
    rank reads its own boxes, and the ranks need not meet. Other values are replaced. A nested
    state dict has the names that DCP gives it, its keys joined by dots. ``options`` say how to
    open the checkpoint: ``model_only=True``, ``rename=[...]``, ``map="auto"`` fit its names to
    the state dict's.

    Raises KeysDiffer where names differ and ``strict``, CannotDo where shapes, element types or
    kinds do, before anything is written; Damaged where the source's bytes are not as they were
    written: what was filled then stays.
    """
    checkpoint = checkpoint_at(path, **options)
    items = _flattened(state_dict)
    report = _matched(checkpoint, items, strict)
    tensors = {n: items[n].value for n in report.loaded if n in checkpoint.tensors}
    values = {n: rebuilt(checkpoint.catalog.objects[n]) for n in report.loaded if n not in tensors}
    entries = {name: checkpoint.entry(name) for name in tensors}
    _require_alike(checkpoint, entries, tensors, [items[name] for name in values])
    staging = Staging()
    wanted = [one for n, t in tensors.items() for one in _wanted(entries[n], t, staging)]
    try:
        checkpoint.fill(wanted, workers)
    finally:
        staging.finish()
    for name, value in values.items():
        items[name].replace(state_dict, value)
    nbytes = sum(one.box.volume * one.entry.dtype.itemsize for one in wanted)
    return LoadReport(report.loaded, report.missing, report.unexpected, nbytes)


@dataclass(frozen=True, slots=True)
class _Item:
    """A leaf of the state dict: its name, where it is, and what it is."""

    name: str
    path: tuple[str | int, ...]
    value: Any

    def replace(self, state_dict: dict[str, Any], value: Any) -> None:
        from torch.distributed.checkpoint._traverse import set_element

        set_element(state_dict, self.path, value)


def _flattened(state_dict: dict[str, Any]) -> dict[str, _Item]:
    """The leaves by name, as ``torch.distributed.checkpoint`` names them."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, paths = flatten_state_dict(state_dict)
    return {name: _Item(name, paths[name], value) for name, value in flat.items()}


def _matched(checkpoint: Checkpoint, items: Mapping[str, _Item], strict: bool) -> LoadReport:
    """Which names both have; KeysDiffer where they must be the same and are not."""
    catalog = checkpoint.catalog
    held = {*catalog.tensors, *catalog.objects, *catalog.conflicts}
    loaded = tuple(name for name in items if name in held)
    missing = tuple(name for name in items if name not in held)
    unexpected = tuple(sorted(held - items.keys()))
    if strict and (missing or unexpected):
        raise _keys_differ(checkpoint, missing, unexpected)
    return LoadReport(loaded, missing, unexpected, 0)


def _keys_differ(
    checkpoint: Checkpoint, missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> KeysDiffer:
    lines = [
        f"  {what} ({len(names):,}): {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    error = KeysDiffer(
        f"{checkpoint.path} and the state dict do not have the same names:\n" + "\n".join(lines),
        hint="model_only=True, select, rename or map fit names; strict=False loads what both have",
    )
    error.missing, error.unexpected = missing, unexpected
    return error


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _require_alike(
    checkpoint: Checkpoint,
    entries: Mapping[str, TensorEntry],
    tensors: Mapping[str, Any],
    values: Sequence[_Item],
) -> None:
    """CannotDo where what the state dict has cannot be filled with what the checkpoint has."""
    import torch

    problems = [why for n, entry in entries.items() if (why := _why_not(entry, tensors[n]))]
    problems += [
        f"{item.name}: a value in the checkpoint, a tensor in the state dict"
        for item in values
        if isinstance(item.value, torch.Tensor)
    ]
    if problems:
        raise CannotDo(
            f"{checkpoint.path} cannot fill the state dict:\n  " + "\n  ".join(_shown(problems)),
            hint="nothing is cast or cut in silence; dtype='bf16' casts, dequantize=True unpacks",
        )


def _shown(problems: list[str]) -> list[str]:
    more = len(problems) - _MOST_SHOWN
    return [*problems[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _why_not(entry: TensorEntry, tensor: Any) -> str | None:
    """Why the tensor cannot hold the entry, with both of what differs; None where it can."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        return f"{entry.name}: a tensor in the checkpoint, a {kind} in the state dict"
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if (shape, dtype) != (entry.shape, entry.dtype.name):
        there, here = f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}"
        return f"{entry.name}: {there} in the checkpoint, {here} in the state dict"
    why = why_not_held(tensor) or why_not_filled(local_tensor(tensor))
    return f"{entry.name}: {why}" if why else None


def _wanted(entry: TensorEntry, tensor: torch.Tensor, staging: Staging) -> Iterator[Wanted]:
    """The boxes that this rank holds, each with its part of the local memory."""
    local = local_tensor(tensor)
    for piece in local_pieces(tensor):
        inside = tuple(map(slice, piece.local.lo, piece.local.hi))
        yield Wanted(entry, piece.box, staging.memory(local[inside] if inside else local))
