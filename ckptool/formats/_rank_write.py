"""Lay out one torch.save file a rank, whose tensors are DTensors on a new mesh.

``checkpoint_{rank}.pt``, as the writer of ``torch.distributed.checkpoint._experimental`` (torch
2.13) calls them.
"""

from __future__ import annotations

from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Path, TensorEntry, tied
from ckptool.core.layout import FileLayout, Layout
from ckptool.core.mesh import Placements, Shard, StridedShard
from ckptool.core.placing import Placed
from ckptool.errors import CannotDo
from ckptool.formats._dtensor_write import RankRecords
from ckptool.formats._outgoing import companion_files, plain_objects
from ckptool.formats._pickle_write import TensorRef
from ckptool.formats._torch_write import torch_archive
from ckptool.formats._tree import nest
from ckptool.formats.base import Request


def lay_out_rank_files(catalog: Catalog, request: Request) -> Layout:
    """One file a rank: its shards of the tensors, and the same values in each.

    Raises CannotDo where the request has no mesh.
    """
    tensors = RankTensors(catalog, placed_of(request))
    objects, notes = plain_objects(catalog)
    values: list[tuple[Path, Any]] = [(entry.path, entry.value) for entry in objects]
    files = companion_files(catalog)
    for rank in range(tensors.mesh.size):
        stem = f"checkpoint_{rank}"
        state = nest([*tensors.leaves(rank), *values])
        files.append(FileLayout(f"{stem}.pt", tuple(torch_archive(state, root=stem)), rank))
    return Layout(tuple(files), folder=True, notes=(*notes, *tensors.notes))


def placed_of(request: Request) -> Placed:
    """The request's mesh and placements; CannotDo where it has none that files a rank can have."""
    placed = request.placed
    if placed is None:
        raise CannotDo("one file a rank needs a device mesh", hint="ckptool reshard --mesh 2x4")
    mesh = placed.mesh
    if set(mesh.ranks) != set(range(mesh.size)):
        raise CannotDo(f"one file a rank needs the ranks 0 to {mesh.size - 1}, not {mesh.ranks}")
    return placed


def stays_plain(catalog: Catalog, entry: TensorEntry) -> bool:
    """Whether a tensor is no DTensor: the source says so or, where it is silent, a scalar is not.

    Scalars such as an optimizer's step and buffers are plain tensors on every rank.
    """
    if catalog.mesh_source == "declared":
        return entry.placements is None
    return not entry.shape


class RankTensors:
    """What the file of each rank holds of a catalog's tensors, once they are cut for a mesh.

    Tied tensors share a storage again, where they are placed alike.
    """

    def __init__(self, catalog: Catalog, placed: Placed) -> None:
        self.mesh = placed.mesh
        self._entries = list(catalog.tensors.values())
        self._placements = placed.placements
        self._plain = {entry.name for entry in self._entries if stays_plain(catalog, entry)}
        self._shards = {
            entry.name: placed.shards(entry)
            for entry in self._entries
            if entry.name not in self._plain
        }
        self._stored = {entry.name: entry for entry in self._entries} | self._tied(catalog)

    def _tied(self, catalog: Catalog) -> dict[str, TensorEntry]:
        """Each tied tensor with the first of its group that is placed as it is."""
        found: dict[str, TensorEntry] = {}
        for names in tied(catalog):
            first: dict[Any, TensorEntry] = {}
            for name in names:
                key = name in self._plain or self._placements[name]
                found[name] = first.setdefault(key, catalog.tensors[name])
        return found

    @property
    def notes(self) -> list[str]:
        """Which tensors are whole on every rank though their placements would cut them."""
        whole = [name for name in self._plain if _cuts(self._placements.get(name, ()))]
        if not whole:
            return []
        listed = ", ".join(sorted(whole)[:8]) + (", ..." if len(whole) > 8 else "")
        return [f"plain tensors, so whole on every rank: {listed}"]

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is whole in the file of every rank, and no DTensor."""
        return name in self._plain

    def leaves(self, rank: int) -> list[tuple[Path, Any]]:
        """The tensors of a rank's file with their paths, as ``torch_archive`` takes them."""
        records = RankRecords(self.mesh, rank)
        position = self.mesh.ranks.index(rank)
        return [(entry.path, self._leaf(entry, records, position)) for entry in self._entries]

    def _leaf(self, entry: TensorEntry, records: RankRecords, position: int) -> Any:
        stored = self._stored[entry.name]
        if entry.name in self._plain:
            return TensorRef(stored, Box.whole(entry.shape))
        shard = self._shards[entry.name][position]
        return records.dtensor(stored, shard, self._placements[entry.name])


def _cuts(placements: Placements) -> bool:
    return any(isinstance(item, Shard | StridedShard) for item in placements)
