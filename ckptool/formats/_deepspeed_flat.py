"""Where each parameter lies in DeepSpeed's flat partitions. Pure geometry, in elements.

ZeRO 1 and 2 (``runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``) put the parameters of a
group one after the other, pad the end, and cut the whole into one partition a rank. ZeRO 3
(``stage3.py``) cuts each parameter by itself: rank r holds elements r * s to (r + 1) * s, where s
is its size divided by the ranks, rounded up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckptool.core.box import flat_range, row_major_strides
from ckptool.core.catalog import Chunk, Extent, Packed, Place
from ckptool.errors import Damaged, Problem

Shapes = Mapping[str, tuple[int, ...]]
"""Parameters by name, in the order in which a flat buffer holds them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``start`` to ``stop`` of a parameter, at element ``at`` of partition ``part``."""

    name: str
    start: int
    stop: int
    part: int
    at: int


def flat_runs(shapes: Shapes, paddings: Sequence[int], size: int, parts: int) -> Iterator[Run]:
    """The runs of a group that was laid out flat and cut into ``parts`` partitions of ``size``.

    ``paddings`` are the elements left free after each parameter. Raises Damaged where the group
    does not fill its partitions up to the alignment, which is less than two elements a partition.
    """
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        for part in range(offset // size, -(-(offset + numel) // size)) if size else ():
            lo, hi = max(offset, part * size), min(offset + numel, (part + 1) * size)
            if lo < hi:
                yield Run(name, lo - offset, hi - offset, part, lo - part * size)
        offset += numel + padding
    if not 0 <= size * parts - offset < max(2 * parts, 1):
        raise Damaged(
            Problem(
                f"{len(shapes):,} parameters of {offset:,} elements do not fit {parts:,} partitions"
                f" of {size:,} elements",
                "storage-mismatch",
            )
        )


def split_runs(shapes: Shapes, sizes: Sequence[int], part: int, parts: int) -> Iterator[Run]:
    """The runs of one rank where each parameter was cut by itself into ``parts`` pieces.

    ``sizes`` are the elements of the rank's sub groups, whose concatenation ``at`` counts through.
    Raises Damaged where the pieces do not fill the sub groups exactly.
    """
    ends = list(accumulate(sizes))
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        piece = -(-numel // parts)
        lo, hi = min(part * piece, numel), min((part + 1) * piece, numel)
        if lo < hi:
            yield Run(name, lo, hi, part, offset)
        crossed = bisect_right(ends, offset)
        offset += piece
        if crossed < len(ends) and ends[crossed] < offset:
            raise Damaged(
                Problem(
                    f"{name}: its piece of {piece:,} elements crosses the end of a sub group",
                    "storage-mismatch",
                )
            )
    if offset != sum(sizes):
        raise Damaged(
            Problem(
                f"{len(shapes):,} parameters take {offset:,} elements of rank {part}'s sub groups,"
                f" which hold {sum(sizes):,}",
                "storage-mismatch",
            )
        )


def run_chunks(
    run: Run, shape: tuple[int, ...], at: Place, itemsize: int, rank: int
) -> list[Chunk]:
    """The chunks of a run whose partition lies at ``at``, a contiguous vector."""
    strides = row_major_strides(shape, itemsize)
    chunks, element = [], run.at
    for box in flat_range(shape, run.start, run.stop):
        chunks.append(Chunk(box, _moved(at, element * itemsize, strides), rank))
        element += box.volume
    return chunks


def _moved(at: Place, nbytes: int, strides: tuple[int, ...]) -> Place:
    if isinstance(at, Extent):
        return replace(at, offset=at.offset + nbytes, strides=strides)
    if isinstance(at, Packed):
        return replace(at, start=at.start + nbytes, strides=strides)
    raise TypeError(f"{at} is no place of a vector")
