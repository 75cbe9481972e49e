"""Carry the tensors of one rule over: assemble the array that they are boxes of, and recut it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Chunk, EncodedBlob, Extent, Place, TensorEntry, merge_copies
from ckptool.core.keymap.axes import Axis, Sizes, axes_of, length_of, size_of, solve, unknown_axes
from ckptool.core.keymap.model import Binding, Block, Pattern, Rule
from ckptool.core.keymap.operation import operation, padding
from ckptool.core.keymap.sizes import BoundTensor, UnknownSizes, kept_size, misfit
from ckptool.core.views import (
    insert_dim,
    join,
    merge_dims,
    narrow,
    pad,
    permute,
    require_one_type,
    split_dim,
    unstack,
)
from ckptool.errors import Unsupported

_MOST_NAMED = 3


class CarriedTensor(Struct, frozen=True):
    """A tensor made by a rule's target pattern; ``entry`` still has its source's name.

    ``block`` of a tensor that is one of several blocks is their dim, and its indices outside and
    inside of them.
    """

    name: str
    entry: TensorEntry
    operation: str
    block: tuple[int, int, int] | None = None

    def followed_by(self, other: CarriedTensor) -> CarriedTensor:
        """Return two blocks of one tensor joined."""
        if self.block is None:
            raise TypeError(f"{self.name} has no blocks")
        dim, outer, inner = self.block
        parts = []
        for entry in (self.entry, other.entry):
            middle = entry.shape[dim] // (outer * inner) if outer * inner else 0
            parts.append(split_dim(entry, dim, [outer, middle, inner]))
        return replace(self, entry=merge_dims(join(parts, dim + 1), dim, 3))


def split_blocks(rule: Rule, group: Sequence[BoundTensor], sizes: Sizes) -> list[BoundTensor]:
    """Return the group with each tensor of several blocks split into these blocks.

    Raises UnknownSizes; Unsupported if the blocks do not add up to their dim.
    """
    return [block for tensor in group for block in _blocks(rule, tensor, sizes)]


def _blocks(rule: Rule, tensor: BoundTensor, known_sizes: Sizes) -> Iterator[BoundTensor]:
    block, entry = tensor.pattern.block, tensor.entry
    if block is None:
        yield tensor
        return
    patterns = rule.blocks(tensor.pattern)
    dims = [d for d in range(len(tensor.axes)) if d != block.dim]
    if len(tensor.axes) != len(entry.shape):
        raise misfit(tensor, known_sizes)
    rest = tuple(tensor.axes[d] for d in dims), tuple(entry.shape[d] for d in dims)
    sizes = solve([rest], known_sizes)
    whole = [(pattern.axes or ())[block.dim] for pattern in patterns]
    if missing := sorted({*unknown_axes(tuple(whole), sizes)}):
        raise UnknownSizes(missing, tensor.pattern.text)
    outer, inner = _lengths(block, sizes)
    lengths = [length_of(dim, sizes) // (outer * inner) if outer * inner else 0 for dim in whole]
    if outer * sum(lengths) * inner != entry.shape[block.dim]:
        raise misfit(tensor, sizes)
    entry, start = split_dim(entry, block.dim, [outer, sum(lengths), inner]), 0
    for pattern, length in zip(patterns, lengths, strict=True):
        part = narrow(entry, block.dim + 1, start, start + length)
        yield BoundTensor(pattern, tensor.binding, merge_dims(part, block.dim, 3))
        start += length


def _lengths(block: Block, sizes: Sizes) -> tuple[int, int]:
    """Return how many indexes the axes outside and inside of blocks have."""
    return length_of(block.outer, sizes), length_of(block.inner, sizes)


def join_blocks(blocks: Sequence[CarriedTensor]) -> list[CarriedTensor]:
    """Return the tensors with the blocks of each, in order, as one."""
    joined: dict[str, CarriedTensor] = {}
    for block in blocks:
        first = joined.get(block.name)
        joined[block.name] = block if first is None else first.followed_by(block)
    return list(joined.values())


def carry(
    rule: Rule, group: Sequence[BoundTensor], sizes: Sizes, *, exact: bool = False
) -> list[CarriedTensor]:
    """Return a rule's targets, made from all sources that differ only in joined axes.

    ``sizes`` are those of ``group_sizes``. Raises Unsupported if a source is missing, and with
    ``exact`` if elements would be added or dropped.
    """
    common = {axis: group[0].binding[axis] for axis in rule.common}
    if rule.tie:
        return _tie(rule, group, common, sizes)
    if rule.renames:
        name = rule.targets[0].name(group[0].binding, sizes)
        entry = _add(group[0].entry, rule.add)
        return [CarriedTensor(name, entry, f"add {rule.add}" if rule.add else "rename")]
    _require_all(rule, group, common, sizes)
    if exact and rule.padding is not None and sizes[rule.padding]:
        raise Unsupported(f"{padding(rule, sizes)} is not a permutation of its elements")
    array = _assemble(rule, group, sizes)
    targets = []
    for pattern in rule.targets:
        what = operation(rule, pattern, sizes)
        block = pattern.block
        position = None if block is None else (block.dim, *_lengths(block, sizes))
        for binding, part in _cut(rule, pattern, array, sizes):
            name = pattern.name(common | binding, sizes)
            entry = _add(_shape(rule, pattern, part, sizes), rule.add)
            targets.append(CarriedTensor(name, entry, what, position))
    return targets


def _add(entry: TensorEntry, add: int) -> TensorEntry:
    """Return a tensor with a number added to each element, rounded to its type as in torch.

    Raises Unsupported if the elements are not floats of 16 bits or more.
    """
    if not add:
        return entry

    def add_to(at: Place) -> Place:
        if not isinstance(at, Extent | EncodedBlob):
            raise Unsupported(f"{entry.name}: quantized, so {add} cannot be added to it")
        return replace(at, ops=(*at.ops, f"add{add:+d}"))

    if entry.source_dtype.kind != "float" or entry.source_dtype.itemsize == 1:
        raise Unsupported(f"{entry.name}: {add} cannot be added to {entry.source_dtype}")
    return replace(entry, chunks=tuple(c.at_places([*map(add_to, c.places)]) for c in entry.chunks))


def one_value(names: Sequence[str], entries: Sequence[TensorEntry]) -> list[CarriedTensor]:
    """Return one tensor under several names; reading checks that all ``entries`` are equal."""
    first = entries[0] if len(entries) == 1 else _as_copies(entries)
    return [CarriedTensor(name, first, "copy" if len(entries) > 1 else "rename") for name in names]


def _as_copies(entries: Sequence[TensorEntry]) -> TensorEntry:
    """Return the first entry with the rest as its copies; their chunks have the same boxes."""
    return replace(entries[0], chunks=merge_copies(_rank_chunks(entries)))


def _tie(
    rule: Rule, group: Sequence[BoundTensor], common: Binding, sizes: Sizes
) -> list[CarriedTensor]:
    """Return the sources as copies of one another, under each target name."""
    first, *rest = entries = [tensor.entry for tensor in group]
    for other in rest:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise Unsupported(
                f"{first.name} {list(first.shape)} and {other.name} {list(other.shape)} are tied"
                " but differ in shape or type"
            )
    if len(entries) > 1:
        first = _as_copies([_cut_like(e, [o for o in entries if o is not e]) for e in entries])
    targets = [pattern for pattern in rule.targets if not pattern.optional]
    what = "rename" if len(group) == len(targets) == 1 else "tie"
    return [CarriedTensor(pattern.name(common, sizes), first, what) for pattern in targets]


def _rank_chunks(entries: Sequence[TensorEntry]) -> Iterator[Chunk]:
    """Yield all chunks and their copies, each with a rank, as every copy needs one."""
    for entry in entries:
        for chunk in entry.chunks:
            yield replace(chunk, rank=chunk.rank or 0)
            for copy in chunk.copies:
                yield Chunk(chunk.box, copy.at, copy.rank)


def _cut_like(entry: TensorEntry, entries: Sequence[TensorEntry]) -> TensorEntry:
    """Cut a tensor's chunks at every boundary of the chunks of ``entries``."""
    for dim in range(len(entry.shape)):
        edges = {e for o in entries for c in o.chunks for e in (c.box.lo[dim], c.box.hi[dim])}
        entry = replace(entry, chunks=tuple(_cut_at(entry, dim, sorted(edges))))
    return entry


def _cut_at(entry: TensorEntry, dim: int, edges: Sequence[int]) -> Iterator[Chunk]:
    for chunk in entry.chunks:
        lo, hi = chunk.box.lo[dim], chunk.box.hi[dim]
        stops = [*(edge for edge in edges if lo < edge < hi), hi]
        if len(stops) == 1:
            yield chunk
            continue
        piece = replace(entry, chunks=(chunk,))
        for start, stop in itertools.pairwise([lo, *stops]):
            shift = tuple(-start if d == dim else 0 for d in range(len(entry.shape)))
            for part in narrow(piece, dim, start, stop).chunks:
                yield replace(part, box=part.box.relative_to(shift))


def _require_all(rule: Rule, group: Sequence[BoundTensor], common: Binding, sizes: Sizes) -> None:
    """Raise Unsupported if one of the sources that belong together is missing."""
    present = {(tensor.pattern.text, *sorted(tensor.binding.items())) for tensor in group}
    patterns = {pattern.text: pattern for pattern in rule.sources}
    spelled = {text: rule.varying(pattern) for text, pattern in patterns.items()}
    counts = (math.prod(sizes[axis] for axis in axes) for axes in spelled.values())
    shortfall = sum(counts) - len(present)
    if shortfall <= 0:
        return
    most = len(present) + _MOST_NAMED
    missing = (
        pattern.name(common | binding, sizes)
        for text, pattern in patterns.items()
        for binding in _indexes(spelled[text], sizes, most)
        if (text, *sorted((common | binding).items())) not in present
    )
    names = ", ".join(itertools.islice(missing, _MOST_NAMED))
    more = f", and {shortfall - _MOST_NAMED:,} more" if shortfall > _MOST_NAMED else ""
    raise Unsupported(
        f"{group[0].entry.name}: {names}{more} not found, required to make {rule.targets[0].text}"
    )


def _indexes(axes: Sequence[str], sizes: Sizes, most: int) -> Iterator[Binding]:
    """Yield the indexes of some axes, below ``most`` each."""
    for indexes in itertools.product(*(range(min(most, sizes[axis])) for axis in axes)):
        yield dict(zip(axes, indexes, strict=True))


def _assemble(rule: Rule, group: Sequence[BoundTensor], sizes: Sizes) -> TensorEntry:
    """Return the array that the sources are boxes of, without padding."""
    require_one_type([tensor.entry for tensor in group])
    chunks: list[Chunk] = []
    for tensor in group:
        entry, axes = _split_axes(tensor, rule, sizes)
        for axis in reversed(rule.varying(tensor.pattern)):
            entry, axes = insert_dim(entry, 0), [(axis,), *axes]
        places = [_find(axes, axis) for axis in rule.axes]
        entry = permute(entry, places)
        shift = tuple(
            -_start(axis, axes[place], tensor.binding, sizes)
            for axis, place in zip(rule.axes, places, strict=True)
        )
        chunks += [replace(chunk, box=chunk.box.relative_to(shift)) for chunk in entry.chunks]
    shape = tuple(kept_size(axis, rule, sizes) for axis in rule.axes)
    return replace(group[0].entry, shape=shape, chunks=tuple(chunks), placements=None, mesh=None)


def _split_axes(tensor: BoundTensor, rule: Rule, sizes: Sizes) -> tuple[TensorEntry, list[Axis]]:
    """Return the tensor with one dim per axis, without padding, and these axes."""
    entry, dims = tensor.entry, tensor.pattern.axes or ()
    for dim in range(len(dims) - 1, -1, -1):
        if len(dims[dim]) != 1:
            entry = split_dim(entry, dim, [size_of(axis, sizes) or 0 for axis in dims[dim]])
    axes = axes_of(dims)
    for dim, axis in enumerate(axes):
        if rule.padding in axis:
            entry = narrow(entry, dim, 0, kept_size(axis, rule, sizes))
    return entry, axes


def _find(axes: Sequence[Axis], axis: Axis) -> int:
    """Return the one of ``axes`` that is a part of an axis, or contains it."""
    return next(place for place, other in enumerate(axes) if not set(axis).isdisjoint(other))


def _start(axis: Axis, part: Axis, binding: Binding, sizes: Sizes) -> int:
    """Return the first index, in a rule's axis, of a tensor that has a part of the axis."""
    if len(axis) == 1:
        return binding.get(axis[0], 0)
    return sum(sizes[name] for name in axis[: axis.index(part[0])])


def _cut(
    rule: Rule, pattern: Pattern, array: TensorEntry, sizes: Sizes
) -> Iterator[tuple[Binding, TensorEntry]]:
    """Yield the boxes of the array that this pattern's names represent, each with its indices."""
    axes = axes_of(pattern.axes or ())
    for dim, axis in enumerate(rule.axes):
        part = next((part_axis for part_axis in axes if set(part_axis) <= set(axis)), axis)
        if part != axis:
            start = _start(axis, part, {}, sizes)
            length = kept_size(part, rule, sizes)
            array = narrow(array, dim, start, start + length)
    spelled = set(rule.varying(pattern))
    yield from _unstack(array, [axis[0] if axis[0] in spelled else "" for axis in rule.axes])


def _unstack(array: TensorEntry, names: Sequence[str]) -> Iterator[tuple[Binding, TensorEntry]]:
    """Yield the array without its named dims, for each of their indices."""
    dim = next((dim for dim, name in enumerate(names) if name), None)
    if dim is None:
        yield {}, array
        return
    for index, part in enumerate(unstack(array, dim)):
        for binding, rest in _unstack(part, [*names[:dim], *names[dim + 1 :]]):
            yield {names[dim]: index, **binding}, rest


def _shape(rule: Rule, pattern: Pattern, part: TensorEntry, sizes: Sizes) -> TensorEntry:
    """Give a box of the array the dims of the pattern."""
    left = [axis for axis in rule.axes if axis[0] not in pattern.spelled]
    axes = axes_of(pattern.axes or ())
    part = permute(part, [_find(left, axis) for axis in axes])
    for dim, axis in enumerate(axes):
        if rule.padding in axis:
            part = pad(part, dim, size_of(axis, sizes) or 0)
    for dim, inner in enumerate(pattern.axes or ()):
        if len(inner) != 1:
            part = merge_dims(part, dim, len(inner))
    return part
