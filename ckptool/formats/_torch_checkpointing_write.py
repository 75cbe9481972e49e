"""Lay out what torch_checkpointing 0.1.1 writes: ``<item>_{rank}.pt`` and ``metadata.pkl``.

Each key at the top of the state dict is an item. Its file of a rank is a torch.save of the value,
with DTensors; ``metadata.pkl`` (version 2.0, plain containers) records the sharding of every
tensor, from which its ``DefaultResharder`` loads onto another mesh.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.core.catalog import Catalog, Index, Path, TensorEntry
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.mesh import Mesh, Placement, Shard, StridedShard
from ckptool.core.placing import Placed
from ckptool.errors import CannotDo
from ckptool.formats._outgoing import companion_files, plain_objects
from ckptool.formats._pickle_write import contiguous_strides
from ckptool.formats._rank_write import RankTensors, placed_of
from ckptool.formats._torch_checkpointing import METADATA
from ckptool.formats._torch_write import torch_archive
from ckptool.formats._tree import nest
from ckptool.formats.base import Request

_FLAT = "model"


def lay_out_torch_checkpointing(catalog: Catalog, request: Request) -> Layout:
    """One file an item and rank, and ``metadata.pkl`` as the last file.

    A state dict without levels becomes the item ``model``. Raises CannotDo where the request has
    no mesh, or a name cannot be an item's.
    """
    placed = placed_of(request)
    objects, notes = plain_objects(catalog)
    outline = _Outline(catalog)
    tensors = RankTensors(catalog, placed)
    files = companion_files(catalog)
    values = [(entry.path, entry.value) for entry in objects]
    for rank in range(placed.mesh.size):
        leaves = [(outline.path(path), leaf) for path, leaf in tensors.leaves(rank)]
        for item, value in _by_item([*leaves, *values]).items():
            files.append(FileLayout(f"{item}_{rank}.pt", tuple(torch_archive(value)), rank))
    metadata = _metadata(catalog, placed, tensors, outline)
    files.append(FileLayout(METADATA, (Literal(pickle.dumps(metadata, protocol=4)),)))
    return Layout(tuple(files), folder=True, notes=(*notes, *tensors.notes))


class _Outline:
    """Where the tensors of a catalog stand among the items."""

    def __init__(self, catalog: Catalog) -> None:
        paths = [entry.path for entry in catalog.tensors.values()]
        self._flat = bool(paths) and all(len(path) < 2 for path in paths)

    def path(self, path: Path) -> Path:
        """The path with its item in front."""
        return (_FLAT, *path) if self._flat else path


def _by_item(leaves: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """The value of each item, nested."""
    inside: dict[str, list[tuple[Path, Any]]] = {}
    for path, leaf in leaves:
        inside.setdefault(_item(path), []).append((path[1:], leaf))
    for item, parts in inside.items():
        if len(parts) > 1 and any(not path for path, _ in parts):
            raise CannotDo(f"{item!r} is both a value and holds others")
    return {item: nest(parts) for item, parts in inside.items()}


def _item(path: Path) -> str:
    """The item of a path; CannotDo where its name cannot begin a file name."""
    item = str(path[0]) if path else "value"
    if not item or item.startswith(".") or any(c in "/\\" or ord(c) < 32 for c in item):
        raise CannotDo(
            f"torch_checkpointing names files by the top of the state dict, not {item!r}",
            hint="ckptool convert --rename or --drop it first",
        )
    return item


# metadata.pkl


@dataclass(frozen=True, slots=True)
class _Records:
    """Sharding records of tensors; those of one mesh share its description, as in the library."""

    mesh: dict[str, Any]
    world: dict[str, Any]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> _Records:
        ranks = tuple(range(mesh.size))
        own = _mesh_spec(mesh.shape, mesh.ranks, mesh.names)
        return cls(own, _mesh_spec((mesh.size,), ranks, None), ranks)

    def record(
        self, entry: TensorEntry, placements: Sequence[Placement] | None
    ) -> list[dict[str, Any]]:
        """What a tensor is on all ranks; plain ones count as replicated over the world."""
        data = {
            "global_shape": list(entry.shape),
            "dtype": f"torch.{entry.dtype.name}",
            "stride": list(contiguous_strides(entry.shape)),
            "mesh_spec": self.world if placements is None else self.mesh,
            "placements": [{"type": "Replicate"}]
            if placements is None
            else [_placement(item, len(entry.shape)) for item in placements],
        }
        sharding = {"type": "DTensorShardingMetadata", "data": data}
        return [{"sharding_metadata": sharding, "ranks": self.ranks}]


def _metadata(
    catalog: Catalog, placed: Placed, tensors: RankTensors, outline: _Outline
) -> dict[str, Any]:
    """``DistributedMetadata.to_dict()``. Items without tensors are not in it."""
    records = _Records.of(placed.mesh)
    items: dict[str, dict[str, Any]] = {}
    for name, entry in catalog.tensors.items():
        path = outline.path(entry.path)
        placements = None if tensors.is_plain(name) else placed.placements[name]
        inside = items.setdefault(_item(path), {})
        inside[_nested_path(name, path[1:])] = records.record(entry, placements)
    default = dict.fromkeys(records.ranks)
    return {
        "metadata": {
            item: {"nested_path_to_metadata": inside, "rank_to_layout_info": dict(default)}
            for item, inside in items.items()
        },
        "world_size": placed.mesh.size,
        "version": "2.0",
    }


def _nested_path(name: str, path: Path) -> str:
    steps = [step.position if isinstance(step, Index) else step for step in path]
    if not all(step is None or isinstance(step, str | int | float) for step in steps):
        raise CannotDo(f"{name}: a key of its path is neither text nor a number")
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
