"""Views of tensors and their parts: entries and places in, the same out. No byte moves.

A tensor's chunks are boxes whose bytes have strides, so each of these is geometry on boxes and
strides; for a ``Container``, not opened yet, and for ``Computed``, on those of its ``part``.
Replicas follow their chunk. Names and paths stay, placements are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from ckptool.core.box import Box, along_dim, flat_range, row_major_strides, without_dim
from ckptool.core.catalog import (
    Chunk,
    Computed,
    Container,
    Copy,
    EncodedBlob,
    Extent,
    Path,
    Place,
    StridedPart,
    TensorEntry,
)
from ckptool.core.dtype import DType
from ckptool.errors import Unsupported

Strides = tuple[int, ...]
Restride = Callable[[Strides], Strides]


def shift_place(at: Place, start: Sequence[int]) -> Place:
    """Return the place of the part of a tensor that begins at index ``start``."""
    if not isinstance(at, Extent | EncodedBlob):
        raise TypeError(f"{at} cannot be shifted")
    if not any(start):
        return at
    return _move_place(at, (), start, lambda strides: strides)


def _strides_of(at: Place, shape: Sequence[int]) -> Strides:
    """Return a place's strides: in bytes, or of an unopened container's ``part`` in elements."""
    return at.strides if isinstance(at, Extent | EncodedBlob) else _part_of(at, shape).strides


def _part_of(at: Container | Computed, shape: Sequence[int]) -> StridedPart:
    """Return the elements of a container that a chunk of ``shape`` consists of: all by default."""
    return at.part or StridedPart(tuple(shape), 0, row_major_strides(shape, 1))


def _readdress(at: Place, shape: Sequence[int], skip: int, strides: Strides) -> Place:
    """Return a place that begins ``skip`` later, in the unit of its strides, with other strides."""
    if isinstance(at, Extent):
        return Extent(at.file, at.offset + skip, strides, at.record, at.ops)
    if isinstance(at, EncodedBlob):
        return replace(at, start=at.start + skip, strides=strides)
    part = _part_of(at, shape)
    return replace(at, part=StridedPart(part.shape, part.start + skip, strides))


def _move_place(at: Place, shape: Sequence[int], first: Sequence[int], restride: Restride) -> Place:
    """Return where the part of a tensor of ``shape`` is that begins at index ``first``."""
    strides = _strides_of(at, shape)
    skip = sum(index * stride for index, stride in zip(first, strides, strict=False))
    return _readdress(at, shape, skip, restride(strides))


def part_of_place(
    at: Place,
    shape: Sequence[int],
    part: Sequence[int],
    start: int,
    strides: Sequence[int],
    itemsize: int,
) -> Place:
    """Return where a part of shape ``part`` is, for a tensor of ``shape`` at the place ``at``.

    ``start`` and ``strides`` address the part in the row-major order of the tensor, in elements of
    ``itemsize`` bytes. Raises ValueError if the tensor's own strides cannot express it.
    """
    unit = itemsize if isinstance(at, Extent | EncodedBlob) else 1
    skip, steps = map_strides(shape, _strides_of(at, shape), part, start, strides, unit)
    return _readdress(at, shape, skip, steps)


def map_strides(
    shape: Sequence[int],
    steps: Sequence[int],
    part: Sequence[int],
    start: int,
    strides: Sequence[int],
    unit: int,
) -> tuple[int, tuple[int, ...]]:
    """Map a row-major start and strides within ``shape`` to a tensor with other ``steps``.

    ``unit`` is the step of a row-major tensor's last dim. Raises ValueError if a stride is not a
    multiple of a dim's, or leads out of it.
    """
    if 0 in shape:
        return 0, (0,) * len(strides)
    rows = row_major_strides(shape, 1)
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    scales = {steps[dim] / rows[dim] for dim in wide} or {float(unit)}
    if len(scales) == 1 and (scale := scales.pop()).is_integer():
        return start * int(scale), tuple(stride * int(scale) for stride in strides)
    last = {dim: start // rows[dim] % shape[dim] for dim in wide}
    skip, mapped = sum(at * steps[dim] for dim, at in last.items()), []
    for size, stride in zip(part, strides, strict=True):
        walked = size > 1 and stride > 0
        dim = next((dim for dim in wide if rows[dim] <= stride), None) if walked else None
        if dim is None:
            mapped.append(0)
            continue
        count, rest = divmod(stride, rows[dim])
        last[dim] += (size - 1) * count
        if rest or last[dim] >= shape[dim]:
            raise ValueError(f"a tensor of {list(shape)} whose elements lie {list(steps)} apart")
        mapped.append(count * steps[dim])
    return skip, tuple(mapped)


def reads_any_order(part: StridedPart, shape: Sequence[int]) -> bool:
    """Return whether a part, a chunk of ``shape``, has strides for any order of stored dims.

    It has none if one of its dims is two dims as stored.
    """
    by_column = tuple(math.prod(part.shape[:dim]) for dim in range(len(part.shape)))
    try:
        map_strides(part.shape, by_column, shape, part.start, part.strides, 1)
    except ValueError:
        return False
    return True


def whole_tensor(
    name: str, path: Path, dtype: DType, shape: tuple[int, ...], at: Place, rank: int | None = None
) -> TensorEntry:
    """Return a tensor that is all at one place, written by ``rank`` if that is known."""
    return TensorEntry(name, path, dtype, shape, (Chunk(Box.whole(shape), at, rank),))


def narrow(entry: TensorEntry, dim: int, start: int, stop: int) -> TensorEntry:
    """Keep the indices ``start`` to ``stop`` of a dim; Unsupported if the tensor has fewer."""
    if not 0 <= start <= stop <= entry.shape[dim]:
        raise Unsupported(
            f"{entry.name}: {start:,} to {stop:,} is out of range in dim {dim} of"
            f" {list(entry.shape)}"
        )
    shape = (*entry.shape[:dim], stop - start, *entry.shape[dim + 1 :])
    region = Box.along(dim, start, shape)
    chunks = []
    for chunk in entry.chunks:
        common = chunk.box.intersect(region)
        if common is not None:
            first = common.relative_to(chunk.box.lo).lo
            chunks.append(part_of_chunk(chunk, common.relative_to(region.lo), first))
    return with_chunks(entry, shape, chunks)


def join(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Concatenate tensors along a dim, under the first one's name.

    Raises Unsupported if their shapes (except for ``dim``) or element types differ.
    """
    first = entries[0]
    chunks: list[Chunk] = []
    length = 0
    for entry in entries:
        _require_alike(first, entry, dim)
        shift = along_dim(dim, -length, len(entry.shape))
        chunks += [replace(chunk, box=chunk.box.relative_to(shift)) for chunk in entry.chunks]
        length += entry.shape[dim]
    return with_chunks(first, (*first.shape[:dim], length, *first.shape[dim + 1 :]), chunks)


def unstack(entry: TensorEntry, dim: int = 0) -> list[TensorEntry]:
    """Return one tensor for each index of a dim, without that dim."""
    parts: list[list[Chunk]] = [[] for _ in range(entry.shape[dim])]
    for chunk in entry.chunks:
        if not chunk.box.volume:
            continue
        box = Box(without_dim(chunk.box.lo, dim), without_dim(chunk.box.hi, dim))
        for index in range(chunk.box.lo[dim], chunk.box.hi[dim]):
            first = along_dim(dim, index - chunk.box.lo[dim], len(entry.shape))
            parts[index].append(part_of_chunk(chunk, box, first, lambda s: without_dim(s, dim)))
    shape = without_dim(entry.shape, dim)
    return [with_chunks(entry, shape, chunks) for chunks in parts]


def part_at(entry: TensorEntry, index: Sequence[int], dim: int = 0) -> TensorEntry:
    """Return the tensor at an index of as many dims, from ``dim`` on, without these."""
    for at in index:
        entry = unstack(narrow(entry, dim, at, at + 1), dim)[0]
    return entry


def insert_dim(entry: TensorEntry, dim: int, size: int = 1) -> TensorEntry:
    """Insert a dim of ``size`` indices that all have the same elements."""

    def grown(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim:])

    chunks = []
    for chunk in entry.chunks:
        box = Box(grown(chunk.box.lo, 0), grown(chunk.box.hi, size))
        chunks.append(part_of_chunk(chunk, box, (), lambda s: grown(s, 0)))
    return with_chunks(entry, grown(entry.shape, size), chunks)


def permute(entry: TensorEntry, dims: Sequence[int]) -> TensorEntry:
    """Put the dims in another order: dim ``d`` of the result is dim ``dims[d]``."""

    def turned(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[d] for d in dims)

    chunks = [
        part_of_chunk(chunk, Box(turned(chunk.box.lo), turned(chunk.box.hi)), (), turned)
        for chunk in entry.chunks
    ]
    return with_chunks(entry, turned(entry.shape), chunks)


def pad(entry: TensorEntry, dim: int, size: int) -> TensorEntry:
    """Lengthen a dim to ``size`` indices by repeating the last one.

    As Megatron-LM's checkpoint converter pads a vocabulary (tools/checkpoint, core 0.12 to 0.20).
    Raises Unsupported if there is no last index, or ``size`` is too small.
    """
    more = size - entry.shape[dim]
    if more < 0 or (more and not entry.shape[dim]):
        raise Unsupported(
            f"{entry.name}: dim {dim} of {list(entry.shape)} cannot be padded to {size:,}"
        )
    if not more:
        return entry
    last = part_at(entry, [entry.shape[dim] - 1], dim)
    return join([entry, insert_dim(last, dim, more)], dim)


def split_dim(entry: TensorEntry, dim: int, sizes: Sequence[int]) -> TensorEntry:
    """View a dim as several, row-major, as ``Tensor.unflatten`` does.

    A chunk that begins or ends amid a row of the new dims becomes several.
    """
    if math.prod(sizes) != entry.shape[dim]:
        raise Unsupported(
            f"{entry.name}: dim {dim} of {list(entry.shape)} is not {' x '.join(map(str, sizes))}"
        )
    steps = row_major_strides(sizes, 1)

    def split_strides(strides: Strides) -> Strides:
        return (*strides[:dim], *(step * strides[dim] for step in steps), *strides[dim + 1 :])

    chunks = []
    for chunk in entry.chunks:
        lo, hi = chunk.box.lo, chunk.box.hi
        for inner in flat_range(sizes, lo[dim], hi[dim]):
            box = Box(
                (*lo[:dim], *inner.lo, *lo[dim + 1 :]), (*hi[:dim], *inner.hi, *hi[dim + 1 :])
            )
            start = sum(i * step for i, step in zip(inner.lo, steps, strict=True)) - lo[dim]
            first = along_dim(dim, start, len(lo))
            chunks.append(part_of_chunk(chunk, box, first, split_strides))
    return with_chunks(entry, (*entry.shape[:dim], *sizes, *entry.shape[dim + 1 :]), chunks)


def merge_dims(entry: TensorEntry, dim: int, count: int) -> TensorEntry:
    """View ``count`` dims from ``dim`` on as one, row-major, as ``Tensor.flatten`` does.

    A chunk whose elements are not evenly spaced along the new dim becomes several.
    """
    if count == 0:
        return insert_dim(entry, dim)
    for at in range(dim + count - 2, dim - 1, -1):
        chunks = [
            part for chunk in entry.chunks for part in _merge_pair(chunk, at, entry.shape[at + 1])
        ]
        entry = with_chunks(
            entry, _collapse(entry.shape, at, entry.shape[at] * entry.shape[at + 1]), chunks
        )
    return entry


def reshape(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """View a tensor in another shape, row-major, as ``Tensor.reshape`` does."""
    if entry.shape == shape:
        return entry
    return split_dim(merge_dims(entry, 0, len(entry.shape)), 0, shape)


def _merge_pair(chunk: Chunk, dim: int, size: int) -> Iterator[Chunk]:
    """Yield a chunk with a dim and the next (of ``size`` indexes in all) as one, in few parts."""
    lo, hi = chunk.box.lo, chunk.box.hi
    outer = range(lo[dim], hi[dim])
    inner = range(lo[dim + 1], hi[dim + 1])
    strides = [_strides_of(at, chunk.box.shape) for at in chunk.places]
    is_even = len(outer) == 1 or (
        len(inner) == size and all(s[dim] == s[dim + 1] * size for s in strides)
    )
    stride_dim = dim if size == 1 else dim + 1
    for index in outer[:1] if is_even or size == 1 else outer:
        stop = outer[-1] if is_even or size == 1 else index
        box = Box(
            _collapse(lo, dim, index * size + inner.start),
            _collapse(hi, dim, stop * size + inner.stop),
        )
        first = along_dim(dim, index - lo[dim], len(lo))
        yield part_of_chunk(chunk, box, first, lambda s: _collapse(s, dim, s[stride_dim]))


def _collapse(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 2 :])


def part_of_chunk(
    chunk: Chunk, box: Box, first: Sequence[int], restride: Restride = lambda strides: strides
) -> Chunk:
    """Return the part of a chunk from local index ``first`` on, as ``box`` of another tensor."""
    shape = chunk.box.shape
    copies = tuple(
        Copy(_move_place(copy.at, shape, first, restride), copy.rank) for copy in chunk.copies
    )
    return Chunk(box, _move_place(chunk.at, shape, first, restride), chunk.rank, copies)


def with_chunks(entry: TensorEntry, shape: tuple[int, ...], chunks: list[Chunk]) -> TensorEntry:
    """Return an entry of another shape; one without elements keeps an empty chunk."""
    solid = [chunk for chunk in chunks if chunk.box.volume]
    if not solid and entry.chunks and not math.prod(shape):
        nowhere = tuple(0 for _ in shape)
        origin = tuple(0 for _ in entry.shape)
        solid = [part_of_chunk(entry.chunks[0], Box.whole(shape), origin, lambda s: nowhere)]
    return replace(entry, shape=shape, chunks=tuple(solid), placements=None, mesh=None)


def require_one_type(entries: Sequence[TensorEntry]) -> None:
    """Raise Unsupported if tensors to be joined have several types."""
    first = entries[0]
    for entry in entries:
        if (entry.dtype, entry.source_dtype) != (first.dtype, first.source_dtype):
            raise Unsupported(
                f"{first.name} is {first.dtype}, {entry.name} {entry.dtype}: they cannot be parts"
                " of one tensor",
                hint="convert with --dtype first, which makes all weights of one type",
            )


def _require_alike(first: TensorEntry, entry: TensorEntry, dim: int) -> None:
    kinds = [(e.dtype, e.source_dtype, without_dim(e.shape, dim)) for e in (first, entry)]
    if kinds[0] != kinds[1]:
        raise Unsupported(
            f"{entry.name} ({entry.dtype} {list(entry.shape)}) does not fit {first.name}"
            f" ({first.dtype} {list(first.shape)}) along dim {dim}"
        )
