"""Which part of a tensor is meant."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.errors import UsageError

Index = Box | slice | Sequence[slice]
"""A box of a tensor, or slices of its first dims as in ``tensor[2:4, :8]``, without steps."""


def box_of(entry: TensorEntry, index: Index | None) -> Box:
    """The box that an index means; UsageError where it is none of this tensor."""
    if index is None:
        return Box.whole(entry.shape)
    if isinstance(index, Box):
        box = index
    else:
        box = _sliced(entry, [index] if isinstance(index, slice) else index)
    fits = len(box.lo) == len(entry.shape) and Box.whole(entry.shape).contains(box)
    if not fits or any(map(int.__lt__, box.hi, box.lo)):
        raise UsageError(f"{entry.name}: {box} is no box of shape {list(entry.shape)}")
    return box


def _sliced(entry: TensorEntry, slices: Sequence[slice]) -> Box:
    are_slices = isinstance(slices, Sequence) and all(isinstance(one, slice) for one in slices)
    if not are_slices or len(slices) > len(entry.shape):
        raise UsageError(
            f"{entry.name} {list(entry.shape)}: {slices!r} is no box of it",
            hint="a slice for each dim, or for the first ones: (slice(0, 2), slice(8))",
        )
    if any(one.step not in (None, 1) for one in slices):
        raise UsageError(f"{entry.name}: slices with steps are not read; take every element")
    rest = [slice(None)] * (len(entry.shape) - len(slices))
    bounds = [one.indices(n) for one, n in zip([*slices, *rest], entry.shape, strict=True)]
    return Box(tuple(lo for lo, _, _ in bounds), tuple(max(lo, hi) for lo, hi, _ in bounds))
