"""Fill live tensors with boxes of a checkpoint, each memory once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptool.api.commands import no_collecting
from ckptool.api.open import Checkpoint
from ckptool.api.staging import Staging, bits_of
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.read.fill import Wanted
from ckptool.engine.read.gather import Array, raw, unit
from ckptool.errors import Unsupported

if TYPE_CHECKING:
    import torch


class Target(NamedTuple):
    """``box`` of a tensor of the checkpoint goes into ``tensor``, which has its shape and type."""

    entry: TensorEntry
    box: Box
    tensor: torch.Tensor


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors share that are the same elements in memory, as tied parameters are."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def fill_targets(
    checkpoint: Checkpoint, targets: Sequence[Target], workers: int | None = None
) -> None:
    """Read every box into its tensor, done when it returns.

    Of several boxes for the same memory one is read into it and the others are compared with it.
    Raises Unsupported where they are not the same, Changed where the checkpoint did not stay as it
    was, else as ``Checkpoint.fill`` does.
    """
    staging = Staging()
    first: dict[tuple[Any, ...], Target] = {}
    again: list[tuple[Target, Target]] = []
    with no_collecting():
        for target in targets:
            held = first.setdefault(memory_of(target.tensor), target)
            if (held.entry.chunks, held.box) != (target.entry.chunks, target.box):
                again.append((held, target))
        wanted = [Wanted(t.entry, t.box, staging.memory(t.tensor)) for t in first.values()]
    try:
        checkpoint.fill(wanted, workers)
    finally:
        staging.finish()
    _require_same(checkpoint, again, workers)
    checkpoint.require_unchanged()


def _require_same(
    checkpoint: Checkpoint, pairs: Sequence[tuple[Target, Target]], workers: int | None
) -> None:
    """Unsupported where boxes for the same memory are not the same; what is read is not kept."""
    held = [_Compared(target.tensor) for _, target in pairs]
    wanted = [Wanted(t.entry, t.box, m) for (_, t), m in zip(pairs, held, strict=True)]
    checkpoint.fill(wanted, workers)
    for (first, target), memory in zip(pairs, held, strict=True):
        if memory.differs.is_set():
            raise Unsupported(
                f"{first.entry.name} and {target.entry.name} share their memory in the state dict,"
                " and differ in the checkpoint",
                hint=f"untie them, or drop={[target.entry.name]}",
            )


class _Compared:
    """Memory that what is read is compared with."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.differs = threading.Event()

    def part(self, where: Box) -> AbstractContextManager[Array]:
        """An array by itself, compared at the end."""
        return self._compared(where)

    @contextmanager
    def _compared(self, where: Box) -> Iterator[Array]:
        there: Array = np.empty(where.shape, unit(self._tensor.element_size()))
        yield there
        here = bits_of(self._tensor[tuple(map(slice, where.lo, where.hi))].cpu())
        if raw(there) != raw(np.ascontiguousarray(here)):
            self.differs.set()
