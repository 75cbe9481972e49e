"""Carry the tensors of one rule over: assemble the array they are boxes of, and cut it anew.

What a rule does to a tensor, in words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptool.core.catalog import Chunk, TensorEntry, merge_copies
from ckptool.core.keymap.axes import Axis, axes_of, size_of
from ckptool.core.keymap.model import Binding, BoundTensor, Pattern, Rule, Sizes, kept_size
from ckptool.core.views import insert_dim, merge_dims, narrow, pad, permute, split_dim, unstack
from ckptool.errors import Unsupported

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a rule's target pattern makes; ``entry`` still has its source's name."""

    name: str
    entry: TensorEntry
    operation: str


def carry(
    rule: Rule, group: Sequence[BoundTensor], sizes: Sizes, *, exact: bool = False
) -> list[Made]:
    """The targets of a rule, from all of the sources that differ only in what it takes together.

    ``sizes`` are those of ``group_sizes``. Raises Unsupported where a source is missing, and with
    ``exact`` where elements would be added or left out.
    """
    common = {axis: group[0].binding[axis] for axis in rule.common}
    if rule.tie:
        return _tied(rule, group, common, sizes)
    if rule.renames:
        name = rule.targets[0].name(group[0].binding, sizes)
        return [Made(name, group[0].entry, "rename")]
    _require_all(rule, group, common, sizes)
    if exact and rule.padding is not None and sizes[rule.padding]:
        raise Unsupported(f"{padding(rule, sizes)} is not a permutation of its elements")
    array = _assembled(rule, group, sizes)
    return [
        Made(pattern.name(common | binding, sizes), _shaped(rule, pattern, part, sizes), what)
        for pattern, what in [(target, operation(rule, target, sizes)) for target in rule.targets]
        for binding, part in _cut(rule, pattern, array, sizes)
    ]


def one_value(names: Sequence[str], entries: Sequence[TensorEntry]) -> list[Made]:
    """One tensor under several names; that all ``entries`` are equal is checked when it is read."""
    first = entries[0] if len(entries) == 1 else _as_copies(entries)
    return [Made(name, first, "copy" if len(entries) > 1 else "rename") for name in names]


def _as_copies(entries: Sequence[TensorEntry]) -> TensorEntry:
    """One tensor whose copies are the others; their chunks have the same boxes."""
    return replace(entries[0], chunks=merge_copies(_ranked(entries)))


# One tensor under several names


def _tied(rule: Rule, group: Sequence[BoundTensor], common: Binding, known: Sizes) -> list[Made]:
    """The sources as copies of one another, under each name that is made."""
    first, *others = [held.entry for held in group]
    for other in others:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise Unsupported(
                f"{first.name} {list(first.shape)} and {other.name} {list(other.shape)} are tied"
                " but differ in shape or type"
            )
    entry = first
    if others:
        all_of = (first, *others)
        entry = _as_copies([_cut_like(e, [o for o in all_of if o is not e]) for e in all_of])
    made = [pattern for pattern in rule.targets if not pattern.optional]
    what = "rename" if len(group) == len(made) == 1 else "tie"
    return [Made(pattern.name(common, known), entry, what) for pattern in made]


def _ranked(entries: Sequence[TensorEntry]) -> Iterator[Chunk]:
    """All chunks and their copies, each with a rank, without which none could be a copy."""
    for entry in entries:
        for chunk in entry.chunks:
            yield replace(chunk, rank=chunk.rank or 0)
            for copy in chunk.copies:
                yield Chunk(chunk.box, copy.at, copy.rank)


def _cut_like(entry: TensorEntry, others: Sequence[TensorEntry]) -> TensorEntry:
    """With its chunks cut wherever those of the others end."""
    for dim in range(len(entry.shape)):
        edges = {e for o in others for c in o.chunks for e in (c.box.lo[dim], c.box.hi[dim])}
        entry = replace(entry, chunks=tuple(_cut_at(entry, dim, sorted(edges))))
    return entry


def _cut_at(entry: TensorEntry, dim: int, edges: Sequence[int]) -> Iterator[Chunk]:
    for chunk in entry.chunks:
        lo, hi = chunk.box.lo[dim], chunk.box.hi[dim]
        stops = [*(edge for edge in edges if lo < edge < hi), hi]
        if len(stops) == 1:
            yield chunk
            continue
        alone = replace(entry, chunks=(chunk,))
        for start, stop in itertools.pairwise([lo, *stops]):
            shift = tuple(-start if d == dim else 0 for d in range(len(entry.shape)))
            for part in narrow(alone, dim, start, stop).chunks:
                yield replace(part, box=part.box.relative_to(shift))


# Assembling and cutting


def _require_all(rule: Rule, group: Sequence[BoundTensor], common: Binding, sizes: Sizes) -> None:
    """Unsupported where one of the sources that belong together is not there."""
    there = {(id(held.pattern), *sorted(held.binding.items())) for held in group}
    lacks = sum(_count(rule, pattern, sizes) for pattern in rule.sources) - len(there)
    if lacks <= 0:
        return
    missing = (
        pattern.name(common | binding, sizes)
        for pattern in rule.sources
        for binding in _indexes(rule, pattern, sizes, len(there) + _MOST_NAMED)
        if (id(pattern), *sorted((common | binding).items())) not in there
    )
    named = ", ".join(itertools.islice(missing, _MOST_NAMED))
    more = f", and {lacks - _MOST_NAMED:,} more" if lacks > _MOST_NAMED else ""
    raise Unsupported(
        f"{group[0].entry.name}: {named}{more} not found, required to make {rule.targets[0].text}"
    )


def _spelled(rule: Rule, pattern: Pattern) -> list[str]:
    """The axes that this pattern's names spell out, and not all names do."""
    return [axis for axis in pattern.spelled if axis not in rule.common]


def _count(rule: Rule, pattern: Pattern, sizes: Sizes) -> int:
    """How many tensors have names of this pattern."""
    return math.prod(sizes[axis] for axis in _spelled(rule, pattern))


def _indexes(rule: Rule, pattern: Pattern, sizes: Sizes, most: int) -> Iterator[Binding]:
    """The indexes of the axes that tell this pattern's names apart, below ``most`` each."""
    spelled = _spelled(rule, pattern)
    for indexes in itertools.product(*(range(min(most, sizes[axis])) for axis in spelled)):
        yield dict(zip(spelled, indexes, strict=True))


def _assembled(rule: Rule, group: Sequence[BoundTensor], sizes: Sizes) -> TensorEntry:
    """The array that the sources are boxes of, without padding."""
    chunks: list[Chunk] = []
    for held in group:
        entry, axes = _apart(held, rule, sizes)
        for axis in reversed(_spelled(rule, held.pattern)):
            entry, axes = insert_dim(entry, 0), [(axis,), *axes]
        places = [_place_of(axis, axes) for axis in rule.axes]
        entry = permute(entry, places)
        shift = tuple(
            -_start(axis, axes[place], held.binding, sizes)
            for axis, place in zip(rule.axes, places, strict=True)
        )
        chunks += [replace(chunk, box=chunk.box.relative_to(shift)) for chunk in entry.chunks]
    shape = tuple(kept_size(axis, rule, sizes) for axis in rule.axes)
    return replace(group[0].entry, shape=shape, chunks=tuple(chunks), placements=None, mesh=None)


def _apart(held: BoundTensor, rule: Rule, sizes: Sizes) -> tuple[TensorEntry, list[Axis]]:
    """The tensor with a dim for each axis, without padding, and these axes."""
    entry, axes = held.entry, held.pattern.axes or ()
    for dim in range(len(axes) - 1, -1, -1):
        if len(axes[dim]) != 1:
            entry = split_dim(entry, dim, [size_of(axis, sizes) or 0 for axis in axes[dim]])
    found = axes_of(axes)
    for dim, axis in enumerate(found):
        if rule.padding in axis:
            entry = narrow(entry, dim, 0, kept_size(axis, rule, sizes))
    return entry, found


def _place_of(axis: Axis, axes: Sequence[Axis]) -> int:
    """Which of a tensor's axes is this one of the rule, or a part of it."""
    return next(place for place, one in enumerate(axes) if set(one) <= set(axis))


def _start(axis: Axis, mine: Axis, binding: Binding, sizes: Sizes) -> int:
    """Where a tensor's indexes of an axis begin among the rule's."""
    if len(axis) == 1:
        return binding.get(axis[0], 0)
    return sum(sizes[name] for name in axis[: axis.index(mine[0])])


def _cut(
    rule: Rule, pattern: Pattern, array: TensorEntry, sizes: Sizes
) -> Iterator[tuple[Binding, TensorEntry]]:
    """The boxes of the array that this pattern's names stand for, each with its indexes."""
    mine = axes_of(pattern.axes or ())
    for dim, axis in enumerate(rule.axes):
        held = next((one for one in mine if set(one) <= set(axis)), axis)
        if held != axis:
            start = _start(axis, held, {}, sizes)
            length = kept_size(held, rule, sizes)
            array = narrow(array, dim, start, start + length)
    yield from _spelled_out(rule.axes, pattern, array, {}, rule)


def _spelled_out(
    axes: Sequence[Axis], pattern: Pattern, array: TensorEntry, binding: Binding, rule: Rule
) -> Iterator[tuple[Binding, TensorEntry]]:
    """The array without the dims whose indexes the pattern's names spell out."""
    for dim, axis in enumerate(axes):
        if axis[0] in pattern.spelled and axis[0] not in rule.common:
            rest = [*axes[:dim], *axes[dim + 1 :]]
            for index, part in enumerate(unstack(array, dim)):
                yield from _spelled_out(rest, pattern, part, binding | {axis[0]: index}, rule)
            return
    yield binding, array


def _shaped(rule: Rule, pattern: Pattern, part: TensorEntry, sizes: Sizes) -> TensorEntry:
    """A box of the array with the dims of the pattern."""
    left = [axis for axis in rule.axes if axis[0] not in pattern.spelled]
    axes = axes_of(pattern.axes or ())
    part = permute(part, [_place_in(left, axis) for axis in axes])
    for dim, axis in enumerate(axes):
        if rule.padding in axis:
            part = pad(part, dim, size_of(axis, sizes) or 0)
    for dim, inner in enumerate(pattern.axes or ()):
        if len(inner) != 1:
            part = merge_dims(part, dim, len(inner))
    return part


def _place_in(left: Sequence[Axis], axis: Axis) -> int:
    return next(place for place, one in enumerate(left) if set(axis) <= set(one))


def operation(rule: Rule, target: Pattern, sizes: Sizes) -> str:
    """How a target of a rule is made, such as ``split q | k | v, permute``."""
    return ", ".join(_words(rule, target, sizes)) or "rename"


def _words(rule: Rule, target: Pattern, sizes: Sizes) -> list[str]:
    words = []
    whole = rule.whole
    if whole is target and len(rule.sources) > 1:
        words.append("join " + " + ".join(_parts_named(rule)))
    if whole is not target and len(rule.targets) > 1:
        words.append("split " + " | ".join(_parts_named(rule)))
    before = {axis for pattern in rule.sources for axis in pattern.spelled} - set(rule.common)
    after = set(target.spelled) - set(rule.common)
    words += [f"stack {axis}" for axis in sorted(before - after)]
    words += [f"unstack {axis}" for axis in sorted(after - before)]
    words += _order(rule, rule.parts if whole is target else (target,))
    if rule.padding is not None and sizes[rule.padding]:
        words.append(padding(rule, sizes))
    return words


def padding(rule: Rule, sizes: Sizes) -> str:
    """``unpad 112 to 103``, or the other way."""
    axis = next(axis for axis in rule.axes if rule.padding in axis)
    full, total = kept_size(axis, rule, sizes), size_of(axis, sizes) or 0
    if rule.whole in rule.targets:
        return f"pad {full:,} to {total:,}"
    return f"unpad {total:,} to {full:,}"


def _parts_named(rule: Rule) -> list[str]:
    """The axes of a sum that tell the parts apart."""
    sums = [axis for axis in axes_of(rule.whole.axes or ()) if len(axis) > 1]
    return [
        " ".join(" + ".join(one) for one in axes_of(part.axes or ()) if set(one) < set(axis))
        for part in rule.parts
        for axis in sums[:1]
    ]


def _order(rule: Rule, parts: tuple[Pattern, ...]) -> list[str]:
    """Whether some part has its axes in another order than the whole."""
    dims = rule.whole.axes or ()
    whole = axes_of(dims)
    for part in parts:
        places = [
            place
            for axis in axes_of(part.axes or ())
            for place, one in enumerate(whole)
            if set(axis) <= set(one)
        ]
        if places != sorted(places):
            flat = all(len(dim) == 1 for dim in (*dims, *(part.axes or ())))
            return ["transpose" if flat else "permute"]
    return []
