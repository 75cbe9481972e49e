"""The sizes of a rule's axes, as the tensors that match it determine them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ckptool.core.catalog import TensorEntry
from ckptool.core.keymap.axes import (
    Axes,
    Axis,
    Sizes,
    axes_of,
    divides,
    length_of,
    show_axes,
    solve,
    unknown_axes,
)
from ckptool.core.keymap.model import Binding, Pattern, Rule
from ckptool.errors import Unsupported, UsageError


class BoundTensor(Struct, frozen=True):
    """A tensor that matches a rule's source pattern, with the indices in its name."""

    pattern: Pattern
    binding: Binding
    entry: TensorEntry

    @property
    def axes(self) -> Axes:
        """The axes of each dim; () if the shape does not matter."""
        return self.pattern.axes or ()


class UnknownSizes(UsageError):
    """Sizes of axes that neither the shapes nor the facts about the model determine."""

    def __init__(self, names: Sequence[str], pattern: str) -> None:
        super().__init__(f"{pattern}: unknown size of {', '.join(names)}")
        self.names = tuple(names)
        self.pattern = pattern

    def all_of(self, names: Sequence[str]) -> UnknownSizes:
        """Return this error for ``names``, the sizes that several rules lack."""
        return UnknownSizes(names, self.pattern)


def group_sizes(rule: Rule, group: Sequence[BoundTensor], known_sizes: Sizes) -> dict[str, int]:
    """Return the sizes of all axes of a rule that are needed to carry the group over.

    Raises UnknownSizes; Unsupported if a shape does not match the axes.
    """
    _require_offsets(rule, known_sizes)
    if rule.renames:
        return dict(known_sizes)
    spelled = _spelled_sizes(rule, group)
    for axis, (size, name) in spelled.items():
        expected = known_sizes.get(axis, size)
        if expected != size:
            raise Unsupported(
                f"{axis} is {expected:,} as given or recorded, but the last of these tensors"
                f" is {name}: {abs(expected - size):,} are"
                f" {'missing' if expected > size else 'too many'}"
            )
    sizes = {**known_sizes, **{axis: size for axis, (size, _) in spelled.items()}}
    if rule.padding is not None and rule.whole in rule.targets:
        sizes.setdefault(rule.padding, 0)
    for tensor in group:
        if len(tensor.axes) != len(tensor.entry.shape):
            raise misfit(tensor, sizes)
    sizes = solve([(tensor.axes, tensor.entry.shape) for tensor in group], sizes)
    unknown = {name for tensor in group for name in unknown_axes(tensor.axes, sizes)}
    unknown |= {a for p in (*rule.sources, *rule.targets) for a in p.spelled} - sizes.keys()
    for tensor in group:
        if not divides(tensor.axes, tensor.entry.shape, sizes):
            raise misfit(tensor, sizes)
    if unknown - set(rule.common):
        raise UnknownSizes(sorted(unknown - set(rule.common)), rule.whole.text)
    for tensor in group:
        if tuple(length_of(dim, sizes) for dim in tensor.axes) != tensor.entry.shape:
            raise misfit(tensor, sizes)
    return sizes


def _require_offsets(rule: Rule, sizes: Sizes) -> None:
    """Raise UnknownSizes if a number in a target's name counts from an unknown size."""
    patterns = (pattern for pattern in rule.targets if not pattern.optional)
    unknown = {offset for pattern in patterns for offset in pattern.needs} - sizes.keys()
    if unknown:
        raise UnknownSizes(sorted(unknown), rule.whole.text)


def _spelled_sizes(rule: Rule, group: Sequence[BoundTensor]) -> dict[str, tuple[int, str]]:
    """Count the indices in the sources' names of each axis that is not in the targets' names.

    Each count comes with the name that has the last index.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in group:
        for axis, index in tensor.binding.items():
            if axis not in rule.common:
                sizes[axis] = max(sizes.get(axis, (0, "")), (index + 1, tensor.entry.name))
    return sizes


def misfit(tensor: BoundTensor, sizes: Sizes) -> Unsupported:
    """Return the error that a tensor's shape does not match its axes."""
    axes, pattern = tensor.axes, tensor.pattern
    texts = [f"{n} {sizes[n]:,}" for axis in axes_of(axes) for n in axis if n in sizes]
    details = f" with {', '.join(texts)}" if texts else ""
    return Unsupported(
        f"{tensor.entry.name}: shape {list(tensor.entry.shape)} does not match"
        f" {pattern.text if pattern.block else f'[{show_axes(axes)}]'}{details}"
    )


def kept_size(axis: Axis, rule: Rule, sizes: Sizes) -> int:
    """Return the size of an axis without padding."""
    return sum(sizes[name] for name in axis if name != rule.padding)
