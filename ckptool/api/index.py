"""Indexes of a tensor as torch takes them: integers, slices with steps, ``...``; or a box."""

from __future__ import annotations

import operator
from contextlib import suppress
from types import EllipsisType
from typing import SupportsIndex

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.subscript import Pick, picks
from ckptool.errors import UsageError

IndexItem = SupportsIndex | slice | EllipsisType
Index = Box | IndexItem | tuple[IndexItem, ...]
"""A box of a tensor, or an index as in ``tensor[2:4, ..., ::2, -1]``."""


def parse_index(entry: TensorEntry, index: Index | None) -> list[Pick]:
    """Return what an index means in each dim; UsageError if it is outside the tensor."""
    if isinstance(index, Box):
        is_within = Box.whole(entry.shape).contains(index)
        if not is_within or any(map(int.__lt__, index.hi, index.lo)):
            raise UsageError(f"{entry.name}: box {index} does not fit shape {list(entry.shape)}")
        return [Pick(range(lo, hi)) for lo, hi in zip(index.lo, index.hi, strict=True)]
    items = () if index is None else index if isinstance(index, tuple) else (index,)
    return picks(entry.name, entry.shape, tuple(_item(entry, item) for item in items))


def _item(entry: TensorEntry, item: object) -> int | slice | EllipsisType:
    if item is ...:
        return item
    if isinstance(item, slice):
        bounds = (item.start, item.stop, item.step)
        return slice(*(None if bound is None else _integer(entry, bound) for bound in bounds))
    return _integer(entry, item)


def _integer(entry: TensorEntry, item: object) -> int:
    """Return an integer of any library; masks and lists of indices are refused."""
    is_mask = isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")
    is_list = bool(getattr(item, "shape", ()))
    if isinstance(item, SupportsIndex) and not (is_mask or is_list):
        with suppress(TypeError):  # every array has __index__, also one of floats
            return operator.index(item)
    raise UsageError(
        f"{entry.name} {list(entry.shape)}: invalid index {item!r}",
        hint="an integer, a slice or ... for each dim: (slice(0, 2), ..., 3)",
    )
