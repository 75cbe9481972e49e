"""One side of the picture of a tensor: which index each row or column of cells stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptool.core.catalog import Chunk


@dataclass(frozen=True, slots=True)
class Axis:
    """``cells`` are indices of tensor dim ``dim``; ``starts`` the numbers of cells worth a label.

    ``dim`` is None on a side along which the tensor does not extend.
    """

    dim: int | None
    cells: tuple[int, ...]
    starts: frozenset[int] = frozenset()
    remark: str = ""

    def label(self, number: int) -> str:
        """The index at which a box begins in this cell, or nothing."""
        return str(self.cells[number]) if number in self.starts else ""


def cut_dims(shape: Sequence[int], chunks: Sequence[Chunk]) -> tuple[int | None, int | None]:
    """The dims to draw downwards and across: those cut most, else the first two."""
    dims = range(len(shape))
    if len(dims) < 2:
        return None, next(iter(dims), None)
    cuts = {dim: len({chunk.box.lo[dim] for chunk in chunks}) for dim in dims}
    down, across = sorted(sorted(dims, key=lambda dim: -cuts[dim])[:2])
    return down, across


def make_axis(
    shape: Sequence[int],
    chunks: Sequence[Chunk],
    dim: int | None,
    wanted: int,
    least: int,
    most: int,
) -> Axis:
    """Cells for a dim: about ``wanted``, at least ``least`` a box, for at most ``most`` boxes."""
    if dim is None:
        return Axis(None, (0,) * wanted)
    length = shape[dim]
    solid = [chunk.box for chunk in chunks if chunk.box.volume]
    edges = {edge for box in solid for edge in (box.lo[dim], box.hi[dim]) if 0 < edge < length}
    bounds = [0, *sorted(edges), length]
    if len(bounds) - 1 <= most:
        return _exact(dim, bounds, wanted, least)
    blocks = [length * i // most for i in range(most)]
    starts = frozenset(range(0, most * least, least))
    remark = f"{len(bounds) - 1:,} boxes along dim {dim}, drawn as {most} blocks"
    return Axis(dim, tuple(at for at in blocks for _ in range(least)), starts, remark)


def _exact(dim: int, bounds: list[int], wanted: int, least: int) -> Axis:
    """Every run between two bounds in its own cells, as many as its length is worth."""
    cells: list[int] = []
    starts = set()
    for low, high in pairwise(bounds):
        starts.add(len(cells))
        cells += [low] * max(least, round(wanted * (high - low) / bounds[-1]))
    return Axis(dim, tuple(cells), frozenset(starts))
