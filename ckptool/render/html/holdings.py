"""The ranks that hold each box of each tensor, compactly: similar tensors share a description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from ckptool.core.box import Box, is_grid
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.mesh import Mesh
from ckptool.core.sharding.dtensor import LocalShard, local_shards
from ckptool.core.text import ranges
from ckptool.errors import Damaged, Unsupported

_MOST_RANKS = 1 << 16
_MOST_BOXES = 1024
"""Boxes listed of a tensor whose boxes are not a grid."""

_Holders = dict[Box, list[int]]
"""The ranks that hold each box; none if the files do not say."""


class Holdings(Struct):
    """Which ranks hold which boxes: tables of ``boxes`` and ``ranks``, shared by tensors.

    ``of`` has for each tensor, by name, the index of its row in each table, and ``by``:
    ``placements`` if these and the mesh determine which ranks hold a box, ``files`` if only the
    rank that wrote it is known. Boxes are a grid, by the edges along each dim as runs
    of start, step and count; or else a list of corners, with how many ``more`` there are. ``ranks``
    has for each box, row-major, a text such as ``0..3,8``.
    """

    of: dict[str, dict[str, Any]] = field(default_factory=dict)
    boxes: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[list[str]] = field(default_factory=list)
    _places: dict[object, int] = field(default_factory=dict)

    def add(self, entry: TensorEntry, mesh: Mesh | None) -> dict[str, Any]:
        """Describe the holders of a tensor."""
        placed = _by_placements(entry, mesh)
        holders = sorted((placed or _by_files(entry)).items())
        boxes = [box for box, _ in holders]
        if is_grid(boxes, entry.shape):
            edges = ({0, *(box.hi[dim] for box in boxes)} for dim in range(len(entry.shape)))
            shape: dict[str, Any] = {"edges": [_runs(sorted(bounds)) for bounds in edges]}
        else:
            holders = [pair for pair in holders if pair[0].volume][:_MOST_BOXES]
            shape = {"boxes": [box for box, _ in holders], "more": len(boxes) - len(holders)}
        ranks = [ranges(sorted({*members})) for _, members in holders]
        return {
            "boxes": self._place(self.boxes, shape),
            "ranks": self._place(self.ranks, ranks),
            "by": "files" if placed is None else "placements",
        }

    def _place(self, table: list[Any], row: Any) -> int:
        at = self._places.setdefault((id(table), repr(row)), len(table))
        if at == len(table):
            table.append(row)
        return at


def holdings(catalog: Catalog) -> Holdings:
    """Describe the tensors of a catalog by rank."""
    result = Holdings()
    descriptions: dict[object, dict[str, Any]] = {}
    for name, entry in catalog.tensors.items():
        mesh = entry.mesh or catalog.mesh
        written = tuple((c.box, c.rank, tuple(k.rank for k in c.copies)) for c in entry.chunks)
        key = (entry.shape, entry.placements, mesh, written)
        if key not in descriptions:
            descriptions[key] = result.add(entry, mesh)
        result.of[name] = descriptions[key]
    return result


def _by_files(entry: TensorEntry) -> _Holders:
    """Return the writers of each box."""
    holders: _Holders = {}
    for chunk in entry.chunks:
        holders.setdefault(chunk.box, []).extend(rank for rank in chunk.ranks if rank is not None)
    return holders


def _by_placements(entry: TensorEntry, mesh: Mesh | None) -> _Holders | None:
    """Return the holders of each box; None if the placements do not say, or the files disagree."""
    if mesh is None or entry.placements is None or mesh.size > _MOST_RANKS or not entry.elements:
        return None
    try:
        shards = local_shards(entry.shape, mesh.shape, entry.placements)
    except (Damaged, Unsupported):
        return None
    by_rank = dict(zip(mesh.ranks, shards, strict=True))
    if not all(_agrees(chunk.box, by_rank.get(chunk.rank)) for chunk in entry.chunks
               if chunk.rank is not None and chunk.box.volume):  # fmt: skip
        return None
    holders: _Holders = {}
    for rank, shard in by_rank.items():
        for piece in shard.pieces:
            holders.setdefault(piece.box, []).append(rank)
    return holders


def _agrees(written: Box, shard: LocalShard | None) -> bool:
    """Return whether a rank holds what it wrote."""
    return shard is not None and any(piece.box.contains(written) for piece in shard.pieces)


def _runs(edges: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as runs of start, step and count."""
    runs: list[list[int]] = []
    for edge in edges:
        if runs and runs[-1][2] == 1:
            runs[-1][1:] = [edge - runs[-1][0], 2]
        elif runs and edge == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([edge, 0, 1])
    return runs
