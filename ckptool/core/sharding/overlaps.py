"""Two boxes that share an element, found among many without comparing each with each."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable

from ckptool.core.box import Box

_CHEAP = 8
"""Pairs a box to compare, up to which a sweep along a dimension is no slower than the tree."""
_MOST_DIMS = 8
"""The cost of the tree has a factor of log n for each: others are only compared."""
_FEW_PAIRS = 256
"""Pairs that are compared rather than cut further: 16 to 4,096 take equally long."""


def overlapping_pair(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Find two boxes that share an element; None if there are none.

    Sweeps along the dimension that separates the boxes best. If that leaves many pairs to compare,
    a segment tree over up to eight dimensions keeps the cost of n boxes near n log n (Zomorodian
    and Edelsbrunner, "Fast software for box intersections").
    """
    solid = [box for box in boxes if box.volume]
    unique = set(solid)
    if len(unique) < len(solid):
        repeated = Counter(solid).most_common(1)[0][0]
        return repeated, repeated
    if len(solid) < 2:
        return None
    costs = {dim: _projected_pairs(solid, dim) for dim in range(len(solid[0].lo))}
    dims = sorted(costs, key=lambda dim: costs[dim])
    if costs[dims[0]] <= _CHEAP * len(solid):
        return _one_way(solid, solid, dims[0])
    return _clash(solid, solid, tuple(dims[:_MOST_DIMS]), -math.inf, math.inf)


def _projected_pairs(boxes: list[Box], dim: int) -> int:
    """Count the pairs that share an index of ``dim``."""
    ends = sorted(box.hi[dim] for box in boxes)
    disjoint_pairs = sum(bisect_right(ends, box.lo[dim]) for box in boxes)
    return len(boxes) * (len(boxes) - 1) // 2 - disjoint_pairs


def _one_way(spans: list[Box], starts: list[Box], dim: int) -> tuple[Box, Box] | None:
    """Find a box of ``spans`` and one of ``starts`` that begins inside it along ``dim``."""
    ordered = sorted(starts, key=lambda box: box.lo[dim])
    lows = [box.lo[dim] for box in ordered]
    for box in spans:
        for at in range(bisect_left(lows, box.lo[dim]), len(lows)):
            if lows[at] >= box.hi[dim]:
                break
            if _overlap(box, ordered[at]):
                return box, ordered[at]
    return None


def _overlap(box: Box, other: Box) -> bool:
    """Return whether two different boxes share an element."""
    return other is not box and box.intersect(other) is not None


def _clash(
    spans: list[Box], starts: list[Box], dims: tuple[int, ...], low: float, high: float
) -> tuple[Box, Box] | None:
    """Find an overlapping pair, one of each list, in a segment tree's node ``low`` to ``high``.

    Along the last of ``dims`` the box of ``starts`` begins in the node and within the other one.
    """
    if len(spans) * len(starts) <= _FEW_PAIRS:
        pairs = ((a, b) for a in spans for b in starts)
        return next((pair for pair in pairs if _overlap(*pair)), None)
    *head, dim = dims
    if not head:
        return _one_way(spans, starts, dim)
    lows = sorted(box.lo[dim] for box in starts)
    if lows[0] == lows[-1]:
        through = [box for box in spans if box.lo[dim] <= lows[0] < box.hi[dim]]
        return _either_way(through, starts, tuple(head))
    through = [box for box in spans if box.lo[dim] <= low and high <= box.hi[dim]]
    pair = _either_way(through, starts, tuple(head))
    middle = lows[max(len(lows) // 2, bisect_right(lows, lows[0]))]
    rest = [box for box in spans if not (box.lo[dim] <= low and high <= box.hi[dim])]
    return (
        pair
        or _clash(
            [box for box in rest if box.lo[dim] < middle and box.hi[dim] > low],
            [box for box in starts if box.lo[dim] < middle],
            dims,
            low,
            middle,
        )
        or _clash(
            [box for box in rest if box.lo[dim] < high and box.hi[dim] > middle],
            [box for box in starts if box.lo[dim] >= middle],
            dims,
            middle,
            high,
        )
    )


def _either_way(one: list[Box], other: list[Box], dims: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Find an overlapping pair of the two lists, whichever of the two begins first."""
    return _clash(one, other, dims, -math.inf, math.inf) or _clash(
        other, one, dims, -math.inf, math.inf
    )
