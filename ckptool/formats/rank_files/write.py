"""Lay out one file per rank on a new mesh: torch.save files, and those of torch_checkpointing.

``checkpoint_{rank}.pt`` is what the writer of ``torch.distributed.checkpoint._experimental`` (torch
2.13) calls its files. torch_checkpointing 0.1.1 writes ``<item>_{rank}.pt``, where each key at the
top of the state dict is an item, and ``metadata.pkl`` (version 2.0, plain containers) with the
sharding of every tensor, from which its ``DefaultResharder`` loads onto another mesh.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Catalog,
    Index,
    ObjectEntry,
    Path,
    RankStep,
    TensorEntry,
    tied_names,
)
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.mesh import Mesh, Placement, Placements, Shard, StridedShard
from ckptool.core.sharding.placement import PlacedTensors
from ckptool.core.text import list_some
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.rank_files.torch_checkpointing import METADATA
from ckptool.formats.writing import lay_out_companions, require_placed, select_plain
from ckptool.serialization.archive.device_mesh import OF_TORCH, MeshRecord
from ckptool.serialization.archive.write import ROOT, RankRecords, archive_file
from ckptool.serialization.pickle.write import TensorRef, contiguous_strides, dtype_global
from ckptool.serialization.state_dict.tree import nest


def lay_out_rank_files(catalog: Catalog, request: Request) -> Layout:
    """Lay out one file per rank: its shards of the tensors, and the same values in each."""
    tensors = RankTensors(catalog, require_placed(request))
    objects, notes = select_plain(catalog)
    files = lay_out_companions(catalog)
    for rank in range(tensors.mesh.size):
        state = nest([*tensors.leaves(rank), *values_of(objects, rank, tensors.mesh)])
        files.append(archive_file(f"checkpoint_{rank}.pt", state, rank=rank))
    return Layout(tuple(files), folder=True, notes=(*notes, *tensors.notes))


def stays_plain(catalog: Catalog, entry: TensorEntry) -> bool:
    """Return whether a tensor is not a DTensor: as in the source, else if it is a scalar.

    Scalars such as an optimizer's step and buffers are plain tensors on every rank.
    """
    if catalog.mesh_source == "declared":
        return entry.placements is None
    return not entry.shape


def values_of(objects: Iterable[ObjectEntry], rank: int, mesh: Mesh) -> Iterator[tuple[Path, Any]]:
    """Yield the values of a rank's file with their paths."""
    for entry in objects:
        if (path := own_path(entry.path, rank, mesh)) is not None:
            yield path, entry.value


def by_family(
    leaves: Iterable[tuple[Path, Any]], family: Callable[[Path], str] = lambda path: str(path[0])
) -> dict[str, Any]:
    """Return the nested state of each family, by which paths begin.

    Raises Unsupported if one is both a value and a container of others.
    """
    items: dict[str, list[tuple[Path, Any]]] = {}
    for path, leaf in leaves:
        items.setdefault(family(path), []).append((path[1:], leaf))
    for name, parts in items.items():
        if len(parts) > 1 and any(not path for path, _ in parts):
            raise Unsupported(f"{name!r} is both a value and a container of others")
    return {name: nest(parts) for name, parts in items.items()}


def own_path(path: Path, rank: int, mesh: Mesh) -> Path | None:
    """Return the path of an entry in the file of ``rank``; None if it is only another rank's.

    State of a rank that the mesh lacks is in all files, with its rank in its name.
    """
    last = path[-1] if path else None
    if not isinstance(last, RankStep) or last.rank not in mesh.ranks:
        return path
    return (*path[:-1], last.step) if last.rank == rank else None


def _is_of_a_rank(entry: TensorEntry) -> bool:
    return bool(entry.path) and isinstance(entry.path[-1], RankStep)


def _mesh_record(catalog: Catalog) -> MeshRecord:
    """Return how device meshes are recorded: as in the source, else by the torch installed here.

    Where neither says so, as by the newest.
    """
    if (recorded := catalog.info.get(OF_TORCH)) is not None:
        return MeshRecord(recorded)
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor, *_ = version("torch").split(".")
        return MeshRecord.of_torch((int(major), int(minor)))
    except (PackageNotFoundError, ValueError):
        return MeshRecord.AXES


class RankTensors:
    """The content of each rank's file from a catalog's tensors, cut for a mesh.

    Tied tensors share a storage again if they are placed alike.
    """

    def __init__(self, catalog: Catalog, placed: PlacedTensors) -> None:
        self.mesh = placed.mesh
        self._how = _mesh_record(catalog)
        self._entries = list(catalog.tensors.values())
        self._placements = placed.placements
        self._plain = {
            entry.name
            for entry in self._entries
            if stays_plain(catalog, entry) or _is_of_a_rank(entry)
        }
        self._shards = {
            entry.name: placed.shards(entry)
            for entry in self._entries
            if entry.name not in self._plain
        }
        self._stored = {entry.name: entry for entry in self._entries} | self._find_ties(catalog)

    def _find_ties(self, catalog: Catalog) -> dict[str, TensorEntry]:
        """Return each tied tensor with the first of its group that is placed as it is."""
        stored: dict[str, TensorEntry] = {}
        for names in tied_names(catalog):
            first: dict[Any, TensorEntry] = {}
            for name in names:
                key = name in self._plain or self._placements[name]
                stored[name] = first.setdefault(key, catalog.tensors[name])
        return stored

    @property
    def notes(self) -> list[str]:
        """What loads the files, and which tensors are whole on every rank despite placements."""
        notes = [f"its DTensors load with torch {self._how.value} only"] if self._shards else []
        copies = [name for name in self._plain if _cuts(self._placements.get(name, ()))]
        if copies:
            notes.append(f"plain tensors, so whole on every rank: {list_some(sorted(copies))}")
        return notes

    def is_plain(self, name: str) -> bool:
        """Return whether a tensor is whole in the file of every rank, and not a DTensor."""
        return name in self._plain

    def leaves(self, rank: int) -> list[tuple[Path, Any]]:
        """Return the tensors of a rank's file with their paths, for ``lay_out_archive``."""
        records = RankRecords(self.mesh, rank, self._how)
        position = self.mesh.ranks.index(rank)
        paths = {entry.name: own_path(entry.path, rank, self.mesh) for entry in self._entries}
        return [
            (path, self._leaf(entry, records, position))
            for entry in self._entries
            if (path := paths[entry.name]) is not None
        ]

    def _leaf(self, entry: TensorEntry, records: RankRecords, position: int) -> Any:
        stored = self._stored[entry.name]
        if entry.name in self._plain:
            return TensorRef.of_box(stored, Box.whole(entry.shape))
        shard = self._shards[entry.name][position]
        return records.dtensor(stored, shard, self._placements[entry.name])


def _cuts(placements: Placements) -> bool:
    return any(isinstance(item, Shard | StridedShard) for item in placements)


_FLAT = "model"


def lay_out_torch_checkpointing(catalog: Catalog, request: Request) -> Layout:
    """Lay out one file per item and rank, and ``metadata.pkl`` as the last file.

    A state dict without levels becomes the item ``model``. Raises Unsupported if the request has
    no mesh, or a name cannot be an item's.
    """
    placed = require_placed(request)
    objects, notes = select_plain(catalog)
    paths = [entry.path for entry in catalog.tensors.values()]
    head: Path = (_FLAT,) if paths and all(len(path) < 2 for path in paths) else ()
    tensors = RankTensors(catalog, placed)
    files = lay_out_companions(catalog)
    values = [(entry.path, entry.value) for entry in objects]
    for rank in range(placed.mesh.size):
        leaves = [((*head, *path), leaf) for path, leaf in tensors.leaves(rank)]
        for item, value in by_family([*leaves, *values], _item).items():
            files.append(archive_file(f"{item}_{rank}.pt", value, root=ROOT, rank=rank))
    metadata = _metadata(catalog, placed, tensors, head)
    files.append(FileLayout(METADATA, (Literal(pickle.dumps(metadata, protocol=4)),)))
    return Layout(tuple(files), folder=True, notes=(*notes, *tensors.notes))


def _item(path: Path) -> str:
    """Return the item of a path; raises Unsupported if its name cannot begin a file name."""
    item = str(path[0]) if path else "value"
    if not item or item.startswith(".") or any(c in "/\\" or ord(c) < 32 for c in item):
        raise Unsupported(
            f"torch_checkpointing names files by the top of the state dict, not {item!r}",
            hint="ckptool convert --rename or --drop it first",
        )
    return item


# metadata.pkl


def _metadata(
    catalog: Catalog, placed: PlacedTensors, tensors: RankTensors, head: Path
) -> dict[str, Any]:
    """Return ``DistributedMetadata.to_dict()``. Items without tensors are not in it.

    Tensors of one mesh share its description, as in the library. Plain ones count as replicated
    over the world.
    """
    mesh, ranks = placed.mesh, tuple(range(placed.mesh.size))
    spec = _mesh_spec(mesh.shape, mesh.ranks, mesh.names)
    world_spec = _mesh_spec((mesh.size,), ranks, None)
    items: dict[str, dict[str, Any]] = {}
    for name, entry in catalog.tensors.items():
        path = (*head, *entry.path)
        if tensors.is_plain(name):
            data = _sharding(entry, world_spec, [{"type": "Replicate"}])
        else:
            rank = len(entry.shape)
            placements = [_placement(item, rank) for item in placed.placements[name]]
            data = _sharding(entry, spec, placements)
        sharding = {"type": "DTensorShardingMetadata", "data": data}
        record = {"sharding_metadata": sharding, "ranks": ranks}
        items.setdefault(_item(path), {})[_nested_path(name, path[1:])] = [record]
    return {
        "metadata": {
            item: {"nested_path_to_metadata": records, "rank_to_layout_info": dict.fromkeys(ranks)}
            for item, records in items.items()
        },
        "world_size": mesh.size,
        "version": "2.0",
    }


def _sharding(
    entry: TensorEntry, mesh_spec: dict[str, Any], placements: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "global_shape": list(entry.shape),
        "dtype": str(dtype_global(entry.dtype)),
        "stride": list(contiguous_strides(entry.shape)),
        "mesh_spec": mesh_spec,
        "placements": placements,
    }


def _nested_path(name: str, path: Path) -> str:
    steps = [step.position if isinstance(step, Index) else step for step in path]
    if not all(step is None or isinstance(step, str | int | float) for step in steps):
        raise Unsupported(f"{name}: a key of its path is neither text nor a number")
    return json.dumps(steps, separators=(",", ":"))


def _mesh_spec(
    shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...] | None
) -> dict[str, Any]:
    return {
        "device_type": "cpu",
        "mesh_shape": shape,
        "mesh_data": ranks,
        "mesh_dim_names": names,
    }


def _placement(item: Placement, rank: int) -> dict[str, Any]:
    if isinstance(item, StridedShard):
        return {
            "type": "StridedShard",
            "dim": item.dim % rank,
            "split_factor": item.split_factor,
        }
    if isinstance(item, Shard):
        return {"type": "Shard", "dim": item.dim % rank}
    return {"type": "Replicate"}
