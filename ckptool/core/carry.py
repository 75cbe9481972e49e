"""Carry the tensors of one rule over: assemble the array they are boxes of, and cut it anew."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptool.core.axes import Axis, axes_of, divides, show_axes, size_of, solve, unknown_axes
from ckptool.core.catalog import Chunk, TensorEntry, merge_copies
from ckptool.core.keymap import Binding, Pattern, Rule
from ckptool.core.reshape import (
    insert_dim,
    merge_dims,
    narrow,
    pad,
    permute,
    split_dim,
    unstack,
)
from ckptool.errors import CannotDo, UsageError

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a rule's source pattern takes, with the indexes that its name spells out."""

    pattern: Pattern
    binding: Binding
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a rule's target pattern makes; ``entry`` still has its source's name."""

    name: str
    entry: TensorEntry
    operation: str


class UnknownSizes(UsageError):
    """Sizes of axes that neither the shapes nor what is known of the model tell."""

    def __init__(self, names: Sequence[str], rule: Rule) -> None:
        super().__init__(f"{rule.whole.text}: the size of {', '.join(names)} is not known")
        self.names = tuple(names)
        self.rule = rule

    def all_of(self, names: Sequence[str]) -> UnknownSizes:
        """The same error, for the sizes that several rules lack."""
        return UnknownSizes(names, self.rule)


def carry(rule: Rule, group: Sequence[Held], sizes: Sizes, *, exact: bool = False) -> list[Made]:
    """The targets of a rule, from all of the sources that differ only in what it takes together.

    ``sizes`` are those of ``group_sizes``. Raises CannotDo where a source is missing, and with
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
        raise CannotDo(f"{_padding_words(rule, sizes)} is no permutation of its elements")
    array = _assembled(rule, group, sizes)
    what = operation(rule, sizes)
    return [
        Made(pattern.name(common | binding, sizes), _shaped(rule, pattern, part, sizes), what)
        for pattern in rule.targets
        for binding, part in _cut(rule, pattern, array, sizes)
    ]


def one_value(names: Sequence[str], entries: Sequence[TensorEntry]) -> list[Made]:
    """One tensor under several names; that all ``entries`` are equal is checked when it is read."""
    first = replace(entries[0], chunks=merge_copies(_ranked(entries)))
    return [Made(name, first, "copy" if len(entries) > 1 else "rename") for name in names]


# One tensor under several names


def _tied(rule: Rule, group: Sequence[Held], common: Binding, known: Sizes) -> list[Made]:
    """The sources as copies of one another, under each name that is made."""
    first, *others = [held.entry for held in group]
    for other in others:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise CannotDo(
                f"{first.name} {list(first.shape)} and {other.name} {list(other.shape)} are tied,"
                " but differ in shape or type"
            )
    aligned = [_cut_like(entry, [e for e in (first, *others) if e is not entry]) for entry in
               (first, *others)]  # fmt: skip
    entry = replace(first, chunks=merge_copies(_ranked(aligned)))
    what = "rename" if len(group) == 1 and len(rule.targets) == 1 else "tie"
    return [Made(p.name(common, known), entry, what) for p in rule.targets if not p.optional]


def _ranked(entries: Sequence[TensorEntry]) -> Iterator[Chunk]:
    """All chunks, each with a rank, without which it could not be another's copy."""
    for entry in entries:
        for chunk in entry.chunks:
            yield replace(chunk, rank=chunk.rank or 0) if len(entries) > 1 else chunk


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


# Sizes


def group_sizes(rule: Rule, group: Sequence[Held], known: Sizes) -> dict[str, int]:
    """The sizes of all axes of a rule that are needed to carry the group over.

    Raises UnknownSizes; CannotDo where a shape is not what the axes say.
    """
    if rule.renames:
        return dict(known)
    given = {**known, **_spelled_sizes(rule, group)}
    if rule.padding is not None and rule.whole in rule.targets:
        given.setdefault(rule.padding, 0)
    odd = [held for held in group if len(held.pattern.axes or ()) != len(held.entry.shape)]
    if odd:
        raise _misfit(odd[0], given)
    sizes = solve([(held.pattern.axes or (), held.entry.shape) for held in group], given)
    wanted = {n for h in group for n in unknown_axes(h.pattern.axes or (), sizes)}
    wanted |= {a for p in (*rule.sources, *rule.targets) for a in p.spelled} - sizes.keys()
    for held in group:
        if not divides(held.pattern.axes or (), held.entry.shape, sizes):
            raise _misfit(held, sizes)
    if wanted - set(rule.common):
        raise UnknownSizes(sorted(wanted - set(rule.common)), rule)
    for held in group:
        _require_fit(held, sizes)
    return sizes


def _spelled_sizes(rule: Rule, group: Sequence[Held]) -> dict[str, int]:
    """How many indexes the sources' names spell out of each axis that the targets' do not."""
    found: dict[str, int] = {}
    for held in group:
        for axis, index in held.binding.items():
            if axis not in rule.common:
                found[axis] = max(found.get(axis, 0), index + 1)
    return found


def _require_fit(held: Held, sizes: Sizes) -> None:
    for dim, length in zip(held.pattern.axes or (), held.entry.shape, strict=True):
        if math.prod(size_of(axis, sizes) or 0 for axis in dim) != length:
            raise _misfit(held, sizes)


def _misfit(held: Held, sizes: Sizes) -> CannotDo:
    axes = held.pattern.axes or ()
    named = [f"{n} {sizes[n]:,}" for axis in axes_of(axes) for n in axis if n in sizes]
    known = f" with {', '.join(named)}" if named else ""
    return CannotDo(
        f"{held.entry.name}: its shape {list(held.entry.shape)} is not [{show_axes(axes)}]{known}"
    )


def _require_all(rule: Rule, group: Sequence[Held], common: Binding, sizes: Sizes) -> None:
    """CannotDo where one of the sources that belong together is not there."""
    there = {(id(held.pattern), *sorted(held.binding.items())) for held in group}
    missing = [
        pattern.name(common | binding, sizes)
        for pattern in rule.sources
        for binding in _indexes(rule, pattern, sizes)
        if (id(pattern), *sorted((common | binding).items())) not in there
    ]
    if missing:
        more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CannotDo(
            f"{group[0].entry.name} is there, but not {', '.join(missing[:3])}{more}, with which"
            f" it becomes {rule.targets[0].text}"
        )


def _indexes(rule: Rule, pattern: Pattern, sizes: Sizes) -> Iterator[Binding]:
    """Every index of the axes that this pattern's names spell out, and not all names do."""
    spelled = [axis for axis in pattern.spelled if axis not in rule.common]
    for indexes in itertools.product(*(range(sizes[axis]) for axis in spelled)):
        yield dict(zip(spelled, indexes, strict=True))


# Assembling and cutting


def _assembled(rule: Rule, group: Sequence[Held], sizes: Sizes) -> TensorEntry:
    """The array that the sources are boxes of, without padding."""
    chunks: list[Chunk] = []
    for held in group:
        entry, axes = _apart(held, rule, sizes)
        spelled = [axis for axis in held.pattern.spelled if axis not in rule.common]
        for axis in reversed(spelled):
            entry, axes = insert_dim(entry, 0), [(axis,), *axes]
        places = [_place_of(axis, axes) for axis in rule.axes]
        entry = permute(entry, places)
        shift = tuple(
            -_start(axis, axes[place], held.binding, sizes)
            for axis, place in zip(rule.axes, places, strict=True)
        )
        chunks += [replace(chunk, box=chunk.box.relative_to(shift)) for chunk in entry.chunks]
    shape = tuple(_kept_size(axis, rule, sizes) for axis in rule.axes)
    return replace(group[0].entry, shape=shape, chunks=tuple(chunks), placements=None, mesh=None)


def _apart(held: Held, rule: Rule, sizes: Sizes) -> tuple[TensorEntry, list[Axis]]:
    """The tensor with a dim for each axis, without padding, and these axes."""
    entry, axes = held.entry, held.pattern.axes or ()
    for dim in range(len(axes) - 1, -1, -1):
        if len(axes[dim]) != 1:
            entry = split_dim(entry, dim, [size_of(axis, sizes) or 0 for axis in axes[dim]])
    found = axes_of(axes)
    for dim, axis in enumerate(found):
        if rule.padding in axis:
            entry = narrow(entry, dim, 0, _kept_size(axis, rule, sizes))
    return entry, found


def _place_of(axis: Axis, axes: Sequence[Axis]) -> int:
    """Which of a tensor's axes is this one of the rule, or a part of it."""
    return next(place for place, one in enumerate(axes) if set(one) <= set(axis))


def _start(axis: Axis, mine: Axis, binding: Binding, sizes: Sizes) -> int:
    """Where a tensor's indexes of an axis begin among the rule's."""
    if len(axis) == 1:
        return binding.get(axis[0], 0)
    return sum(sizes[name] for name in axis[: axis.index(mine[0])])


def _kept_size(axis: Axis, rule: Rule, sizes: Sizes) -> int:
    return sum(sizes[name] for name in axis if name != rule.padding)


def _cut(
    rule: Rule, pattern: Pattern, array: TensorEntry, sizes: Sizes
) -> Iterator[tuple[Binding, TensorEntry]]:
    """The boxes of the array that this pattern's names stand for, each with its indexes."""
    mine = axes_of(pattern.axes or ())
    for dim, axis in enumerate(rule.axes):
        held = next((one for one in mine if set(one) <= set(axis)), axis)
        if held != axis:
            start = _start(axis, held, {}, sizes)
            length = _kept_size(held, rule, sizes)
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


# Words


def operation(rule: Rule, sizes: Sizes) -> str:
    """What a rule does to its tensors, in words."""
    words = _in_words(rule, sizes)
    return ", ".join(words) or "rename"


def _in_words(rule: Rule, sizes: Sizes) -> list[str]:
    sources, targets = rule.sources, rule.targets
    words = []
    whole = rule.whole
    if whole in targets and len(sources) > 1:
        words.append("join " + " + ".join(_parts_named(rule)))
    if whole in sources and len(targets) > 1:
        words.append("split " + " | ".join(_parts_named(rule)))
    spelled = [
        {a for p in side for a in p.spelled} - set(rule.common) for side in (sources, targets)
    ]
    words += [f"stack {axis}" for axis in sorted(spelled[0] - spelled[1])]
    words += [f"unstack {axis}" for axis in sorted(spelled[1] - spelled[0])]
    words += _order_in_words(rule)
    if rule.padding is not None and sizes[rule.padding]:
        words.append(_padding_words(rule, sizes))
    return words


def _padding_words(rule: Rule, sizes: Sizes) -> str:
    axis = next(axis for axis in rule.axes if rule.padding in axis)
    full, total = _kept_size(axis, rule, sizes), size_of(axis, sizes) or 0
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


def _order_in_words(rule: Rule) -> list[str]:
    """Whether some target has its axes in another order than its source."""
    whole = axes_of(rule.whole.axes or ())
    for part in rule.parts:
        mine = axes_of(part.axes or ())
        order = [_place_in(whole, axis) for axis in mine if any(set(axis) <= set(o) for o in whole)]
        if order != sorted(order):
            flat = all(len(dim) == 1 for dim in (*(rule.whole.axes or ()), *(part.axes or ())))
            return ["transpose" if flat else "permute"]
    return []
