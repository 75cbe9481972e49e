"""Named axes: how a map describes the dims of a tensor.

``layer (kv (q + k + v) dim) hidden`` is a tensor of three dims. The second consists of three axes,
row-major as in ``Tensor.unflatten``; the middle one of them has ``q`` indices, then ``k``, then
``v``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from ckptool.errors import UsageError

Axis = tuple[str, ...]
"""One name; or several, with consecutive indices."""

Dim = tuple[Axis, ...]
"""The axes of a dim, slowest first."""

Axes = tuple[Dim, ...]
"""The axes of each dim of a tensor."""

NAME = re.compile(r"[a-z][a-z0-9_]*")
_SUM = rf"{NAME.pattern}(?:\s*\+\s*{NAME.pattern})*"
_WORD = re.compile(rf"\s*(?:({NAME.pattern}|\(\s*{_SUM}\s*\))|([()]))")


def parse_axes(text: str) -> Axes:
    """Parse dims written as in the module's docstring; UsageError if they are invalid."""
    dims: list[Dim] = []
    inside: list[Axis] | None = None
    at = 0
    while at < len(text.rstrip()):
        word = _WORD.match(text, at)
        if word and word[1]:
            axis = tuple(NAME.findall(word[1]))
            if inside is None:
                dims.append((axis,))
            else:
                inside.append(axis)
        elif word and word[2] == "(" and inside is None:
            inside = []
        elif word and word[2] == ")" and inside is not None:
            dims.append(tuple(inside))
            inside = None
        else:
            rest = text[at:].strip()
            if inside is not None and rest.startswith("+"):
                raise UsageError(f"[{text}]: invalid sum of axes {rest!r}, expected (q + k + v)")
            raise UsageError(f"[{text}]: invalid axis name {rest!r}")
        at = word.end()
    if inside is not None:
        raise UsageError(f"[{text}]: unclosed parenthesis")
    names = [name for dim in dims for axis in dim for name in axis]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise UsageError(f"[{text}] repeats axis {min(repeated)}")
    return tuple(dims)


def axes_of(dims: Axes) -> list[Axis]:
    """Return all axes, in order."""
    return [axis for dim in dims for axis in dim]


def show_axes(dims: Sequence[Dim]) -> str:
    """Return the dims in the notation that ``parse_axes`` reads."""
    return " ".join(map(_show_dim, dims))


def _show_dim(dim: Dim) -> str:
    parts = [" + ".join(axis) if len(axis) > 1 else axis[0] for axis in dim]
    if len(dim) == 1:
        return f"({parts[0]})" if len(dim[0]) > 1 else parts[0]
    return "(" + " ".join(f"({p})" if "+" in p else p for p in parts) + ")"


Sizes = Mapping[str, int]
Shape = tuple[int, ...]


def solve(tensors: Sequence[tuple[Axes, Shape]], known_sizes: Sizes) -> dict[str, int]:
    """Return the size of every axis that follows from shapes and known sizes.

    Two axes of a sum are never assumed equal: fused parts need not be halves.
    """
    sizes = dict(known_sizes)
    equations = {
        (dim, length) for axes, shape in tensors for dim, length in zip(axes, shape, strict=True)
    }
    progress = True
    while progress:
        solved: dict[str, int] = {}
        for dim, length in equations:
            solved |= _solve_dim(dim, length, sizes)
        progress = bool(solved)
        sizes |= solved
    return sizes


def _solve_dim(dim: Dim, length: int, sizes: Sizes) -> dict[str, int]:
    """Return the sizes that one dim of ``length`` indices determines, if one axis is unknown."""
    unknown = [axis for axis in dim if size_of(axis, sizes) is None]
    if len(unknown) != 1:
        return {}
    product = math.prod(size_of(axis, sizes) or 0 for axis in dim if axis != unknown[0])
    if not product or length % product:
        return {}
    missing = [name for name in unknown[0] if name not in sizes]
    size = length // product - sum(sizes.get(name, 0) for name in unknown[0])
    return {missing[0]: size} if len(missing) == 1 and size >= 0 else {}


def divides(axes: Axes, shape: Shape, sizes: Sizes) -> bool:
    """Return whether the known sizes divide the lengths of the dims, and no sum exceeds them."""
    for dim, length in zip(axes, shape, strict=True):
        product = math.prod(size_of(axis, sizes) or 1 for axis in dim)
        if length % product or any(sum(sizes.get(n, 0) for n in axis) > length for axis in dim):
            return False
    return True


def size_of(axis: Axis, sizes: Sizes) -> int | None:
    """Return the size of an axis, None if some part of it is unknown."""
    if not all(name in sizes for name in axis):
        return None
    return sum(sizes[name] for name in axis)


def length_of(dim: Dim, sizes: Sizes) -> int:
    """Return how many indices the axes of a dim have together, 0 if a size is unknown."""
    return math.prod(size_of(axis, sizes) or 0 for axis in dim)


def unknown_axes(dims: Axes, sizes: Sizes) -> Iterator[str]:
    """Yield the names of axes whose size is unknown."""
    for axis in axes_of(dims):
        yield from (name for name in axis if name not in sizes)
