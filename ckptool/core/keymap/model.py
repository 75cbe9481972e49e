"""A key map: the name of each tensor of one layout in another, and how it is made from others.

A rule pairs names, such as ``layers.{layer}.wq.weight [(head pair two) hidden]``. Braces contain an
axis whose index is in the name; brackets (see ``core/keymap/axes.py``) the axes of the tensor's
dims. A tensor is a box of an array that has all of these axes. So the same axes in two arrangements
say how to rename, split, join, stack, unstack, permute and pad, and how to undo it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.keymap.axes import Axes, Axis, Dim, axes_of
from ckptool.core.text import MOST_STEPS

_NUMBER = re.compile(r"[0-9]+")

Binding = dict[str, int]
"""The index of each axis in a name."""


class Slot(Struct, frozen=True):
    """A number in a name: the index of an axis, counted from the size called ``offset``."""

    axis: str
    offset: str | None = None


class Block(Struct, frozen=True):
    """The position of one block of a dim: its dim, the axes around the blocks, its index."""

    dim: int
    outer: Dim
    inner: Dim
    place: int


class Pattern(Struct, frozen=True):
    """Names of one kind of tensor, and its axes; ``axes`` is None if the shape does not matter.

    ``key`` is the name with ``#`` for each number, ``slots`` are these numbers. An ``optional`` one
    is accepted but never made. A tensor of several blocks has a pattern for each: ``block`` is its
    position; all have the same text, and the axes of the tensor without the others.
    """

    text: str
    key: str
    slots: tuple[Slot | int, ...]
    axes: Axes | None = None
    optional: bool = False
    block: Block | None = None

    @property
    def spelled(self) -> tuple[str, ...]:
        """The axes whose indices names contain."""
        return tuple(slot.axis for slot in self.slots if isinstance(slot, Slot))

    @property
    def needs(self) -> set[str]:
        """The sizes without which a name of this kind cannot be matched."""
        return {s.offset for s in self.slots if isinstance(s, Slot) and s.offset is not None}

    def match(self, numbers: Sequence[int], sizes: Mapping[str, int]) -> Binding | None:
        """Return the indices in the numbers of a name with this ``key``, or None."""
        binding: Binding = {}
        for slot, number in zip(self.slots, numbers, strict=True):
            if isinstance(slot, int):
                if slot != number:
                    return None
                continue
            index = number - (sizes[slot.offset] if slot.offset else 0)
            if index < 0 or binding.setdefault(slot.axis, index) != index:
                return None
        return binding

    def name(self, binding: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        """Return the name of the tensor with these indices."""
        pieces = self.key.split("#")
        numbers = [
            slot
            if isinstance(slot, int)
            else binding[slot.axis] + (sizes[slot.offset] if slot.offset else 0)
            for slot in self.slots
        ]
        rest = [f"{n}{piece}" for n, piece in zip(numbers, pieces[1:], strict=True)]
        return pieces[0] + "".join(rest)


@lru_cache(1 << 16)
def abstract(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a name with ``#`` for each number, and the numbers; "" where one starts with 0."""
    numbers = _NUMBER.findall(name)
    if "#" in name or any(len(n) > 9 or (n[0] == "0" and n != "0") for n in numbers):
        return "", ()
    return _NUMBER.sub("#", name), tuple(map(int, numbers))


class Rule(Struct, frozen=True, dict=True):
    """Sources and targets with the same elements; one side is a single tensor, or they are pairs.

    ``padding`` is the axis whose indices are only filler, ``tie`` means that all patterns are the
    same tensor, ``when`` names a fact that must hold, ``unless`` one that must not, ``only`` the
    part of the checkpoint (``model`` or ``optimizer``) that the rule is for. ``beside`` is a name
    that must exist, too, with the same indices; ``back`` is that of the other direction. ``add`` is
    added to the elements of the sources.

    ``pairs`` are rules of one source and one target each, if several sources make as many targets.
    """

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    padding: str | None = None
    tie: bool = False
    when: str | None = None
    only: str | None = None
    unless: str | None = None
    beside: Pattern | None = None
    back: Pattern | None = None
    add: int = 0

    @cached_property
    def whole(self) -> Pattern:
        """Return the pattern with all of the axes."""
        single = [side[0] for side in (self.sources, self.targets) if len(side) == 1]
        return max(single or self.sources, key=_names_axes)

    @cached_property
    def common(self) -> tuple[str, ...]:
        """Return the axes in all names: one group of tensors has each of their indices."""
        patterns = (*self.sources, *self.targets)
        return tuple(a for a in self.whole.spelled if all(a in p.spelled for p in patterns))

    @property
    def inverse(self) -> Rule:
        return replace(
            self,
            sources=self.targets,
            targets=self.sources,
            beside=self.back,
            back=self.beside,
            add=-self.add,
        )

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns on the other side."""
        return self.targets if self.sources[0] is self.whole else self.sources

    @property
    def pairs(self) -> list[Rule]:
        if self.tie or len(self.sources) == 1 or len(self.targets) == 1:
            return []
        pairs = zip(self.sources, self.targets, strict=True)
        return [replace(self, sources=(source,), targets=(target,)) for source, target in pairs]

    def blocks(self, pattern: Pattern) -> list[Pattern]:
        """Return the patterns of the blocks that a source consists of."""
        return [source for source in self.sources if source.text == pattern.text]

    @property
    def renames(self) -> bool:
        """Whether shapes do not matter."""
        return self.whole.axes is None

    @property
    def axes(self) -> list[Axis]:
        """All axes of the array that a group's tensors are boxes of, in order."""
        spelled = [(axis,) for axis in self.varying(self.whole)]
        return [*spelled, *axes_of(self.whole.axes or ())]

    def varying(self, pattern: Pattern) -> list[str]:
        """Return the axes in a pattern's names that are not in all names."""
        return [axis for axis in pattern.spelled if axis not in self.common]


def _names_axes(pattern: Pattern) -> int:
    return len(pattern.spelled) + sum(map(len, axes_of(pattern.axes or ())))


class KeepRule(Struct, frozen=True):
    """Keeps names that no ``Rule`` matches: the glob ``source``, and that of their new names.

    The tensors stay unchanged. If ``target`` is another glob, only the names' prefixes differ.
    """

    source: str
    target: str

    @property
    def inverse(self) -> KeepRule:
        return KeepRule(self.target, self.source)

    def new_name(self, name: str) -> str:
        """Return the new name of a name that the glob matches."""
        if self.source == self.target:
            return name
        old, new = self.prefixes
        return new + name.removeprefix(old)

    @property
    def prefixes(self) -> tuple[str, str]:
        """What source and target have before the part that is the same."""
        source, target = self.source, self.target
        while source and target and source[-1] == target[-1]:
            source, target = source[:-1], target[:-1]
        return source, target


class KeyMap(Struct, frozen=True):
    """Rules, in order: the first that matches a name applies.

    ``sizes`` say where the size of an axis is recorded: keys and expressions to look up, or the
    number itself. ``drop`` are source names to exclude, ``marks`` names one of which identifies a
    checkpoint of the source's kind, ``model_types`` those of config.json, ``unless`` facts about a
    model that it is not for, ``tells`` the facts that hold if all names of each exist. ``keep`` are
    names that no rule matches and that stay unchanged, except for their prefix; of several the
    longest glob decides. ``detected`` says whether it is applied without being named, and
    ``needs_model_type`` that config.json must then name a model's type. ``back_drop``,
    ``back_marks`` and ``back_detected`` are those of the other direction.
    """

    name: str
    summary: str
    source: str
    target: str
    rules: tuple[Rule, ...]
    sizes: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    drop: tuple[Pattern, ...] = ()
    marks: tuple[Pattern, ...] = ()
    model_types: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    tells: Mapping[str, tuple[Pattern, ...]] = field(default_factory=dict)
    keep: tuple[KeepRule, ...] = ()
    back_drop: tuple[Pattern, ...] = ()
    back_marks: tuple[Pattern, ...] = ()
    detected: bool = True
    back_detected: bool = True
    needs_model_type: bool = False

    @property
    def axes(self) -> set[str]:
        """The names of all axes whose sizes may be given."""
        patterns = [p for rule in self.rules for p in (*rule.sources, *rule.targets)]
        names = {name for p in patterns for axis in axes_of(p.axes or ()) for name in axis}
        offsets = {offset for pattern in patterns for offset in pattern.needs}
        return names | offsets | self.numbered | self.sizes.keys()

    @property
    def numbered(self) -> frozenset[str]:
        """The axes whose index is in some name."""
        patterns = (p for rule in self.rules for p in (*rule.sources, *rule.targets))
        return frozenset(axis for pattern in patterns for axis in pattern.spelled)

    def kept_as(self, name: str) -> str | None:
        """Return the new name of a parameter that no rule matches; None if it is not kept."""
        if name.count(".") > MOST_STEPS:
            return None
        fitting = [keep for keep in self.keep if fnmatchcase(name, keep.source)]
        longest = max(fitting, key=lambda keep: len(keep.source), default=None)
        return longest.new_name(name) if longest else None

    @property
    def inverse(self) -> KeyMap:
        """The map in the other direction."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            rules=tuple(rule.inverse for rule in self.rules),
            keep=tuple(keep.inverse for keep in self.keep),
            drop=self.back_drop,
            marks=self.back_marks,
            back_drop=self.drop,
            back_marks=self.marks,
            detected=self.back_detected,
            back_detected=self.detected,
        )
