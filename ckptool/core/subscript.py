"""Subscripts of tensors in numpy's notation, ``NAME[0:4, :8]``, and the views that they select."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import EllipsisType

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, Place, TensorEntry
from ckptool.core.text import plural
from ckptool.core.views import part_of_chunk, with_chunks
from ckptool.errors import UsageError

Subscript = tuple[int | slice | EllipsisType, ...]

_ITEM = re.compile(r"(-?\d{1,18})|(-?\d{1,18})?\s*:\s*(-?\d{1,18})?(?:\s*:\s*(-?\d{1,18})?)?")


class Pick(Struct, frozen=True):
    """The wanted indices of one dim, ascending; ``is_one`` drops the dim."""

    indexes: range
    is_one: bool = False

    def positions(self, low: int, high: int) -> tuple[int, int]:
        """Return the first index within ``low:high``, and the end of those within."""
        start, step = self.indexes.start, self.indexes.step
        first, end = (-((start - bound) // step) for bound in (low, high))
        first = min(max(0, first), len(self.indexes))
        return first, max(first, min(end, len(self.indexes)))


def split_subscript(text: str) -> tuple[str, Subscript]:
    """Split ``NAME[0:4, ..., -1]`` into the name and its subscript, empty if there is none."""
    head, bracket, inner = text.rpartition("[")
    if not (head and bracket and inner.endswith("]")):
        return text, ()
    items = [_item(part.strip()) for part in inner[:-1].split(",")]
    return (text, ()) if None in items else (head, tuple(i for i in items if i is not None))


def _item(text: str) -> int | slice | EllipsisType | None:
    """Return the meaning of one item of a subscript; None if it is invalid."""
    if text == "...":
        return ...
    match = _ITEM.fullmatch(text)
    if match is None:
        return None
    index, *bounds = match.groups()
    return int(index) if index else slice(*(None if b is None else int(b) for b in bounds))


def picks(name: str, shape: Sequence[int], subscript: Subscript) -> list[Pick]:
    """Return the indices of each dim of a tensor that a subscript selects, as numpy does.

    Raises UsageError if it has more items than the tensor dims, an index is out of range, or a step
    is not positive.
    """
    label = f"{name} {list(shape)}"
    count = sum(item is not ... for item in subscript)
    missing = len(shape) - count
    if missing < 0 or len(subscript) - count > 1:
        most = f"[{', '.join(':' for _ in shape)}]" if shape else ""
        raise UsageError(
            f"{label}: {plural(len(subscript), 'subscript')} for {plural(len(shape), 'dim')}",
            hint=f"at most one for each dim: '{name}{most}'",
        )
    at = subscript.index(...) if ... in subscript else len(subscript)
    items = [*subscript[:at], *[slice(None)] * missing, *subscript[at + 1 :]]
    return [_pick(label, item, size) for item, size in zip(items, shape, strict=True)]


def _pick(label: str, item: int | slice | EllipsisType, size: int) -> Pick:
    if isinstance(item, slice):
        if item.step is not None and item.step < 1:
            raise UsageError(
                f"{label}: the step {item.step} is less than 1", hint="such as [0:8:2]"
            )
        return Pick(range(*item.indices(size)))
    if not isinstance(item, int) or not -size <= item < size:
        raise UsageError(
            f"{label}: index {item} is out of range for a dim of {size:,}",
            hint=f"from 0 to {size - 1:,}, or from the end: -1 to -{size:,}",
        )
    return Pick(range(item % size, item % size + 1), is_one=True)


def without_other_chunks(entry: TensorEntry, picks: Sequence[Pick]) -> TensorEntry:
    """Keep the chunks that contain any picked element, completely, without replicas."""
    chunks = [chunk for chunk in entry.chunks if _common(chunk.box, picks).volume]
    chunks = chunks or list(entry.chunks[:1])
    return replace(entry, chunks=tuple(replace(chunk, copies=()) for chunk in chunks))


def take(entry: TensorEntry, picks: Sequence[Pick]) -> TensorEntry:
    """View the picked elements of a tensor, as ``tensor[subscript]`` does; no byte is read.

    A checksum stays only if everything that it covers is picked. Replicas are dropped.
    """
    shape = tuple(len(pick.indexes) for pick in picks if not pick.is_one)
    chunks = []
    for chunk in entry.chunks:
        common = _common(chunk.box, picks)
        if not common.volume:
            continue
        part = _part(replace(chunk, copies=()), common, picks)
        whole = common.volume == chunk.box.volume
        chunks.append(part if whole else part.at_places([*map(_without_record, part.places)]))
    return with_chunks(entry, shape, chunks)


def _common(box: Box, picks: Sequence[Pick]) -> Box:
    """Return which positions among the picked indices are in a box."""
    ends = [p.positions(lo, hi) for p, lo, hi in zip(picks, box.lo, box.hi, strict=True)]
    return Box(tuple(first for first, _ in ends), tuple(end for _, end in ends))


def _part(chunk: Chunk, common: Box, picks: Sequence[Pick]) -> Chunk:
    """Return the part of a chunk at these positions, without the dims indexed by one number."""
    dims = [dim for dim, pick in enumerate(picks) if not pick.is_one]
    first = [p.indexes[at] - lo for p, at, lo in zip(picks, common.lo, chunk.box.lo, strict=True)]
    box = Box(tuple(common.lo[dim] for dim in dims), tuple(common.hi[dim] for dim in dims))

    def restride(strides: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(strides[dim] * picks[dim].indexes.step for dim in dims)

    return part_of_chunk(chunk, box, first, restride)


def _without_record(at: Place) -> Place:
    return replace(at, record=None) if isinstance(at, Extent) else at
