"""One rank's part in loading a checkpoint through torch: its shards, and what they must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ckptool.commands.reshard.reshard import PreparedReshard
from ckptool.core.catalog import TensorEntry
from ckptool.core.layout import Data, Scattered, tiles
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import LocalShard, Piece
from ckptool.core.sharding.placement import Placed
from ckptool.engine.ranks import Ranks
from ckptool.engine.read.gather import Array, Gatherer, unit
from ckptool.errors import TransferError, Unsupported

_GROUP = 256 << 20
_TILE = 1 << 20

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What a rank has of a tensor: ``local`` is its memory, ``pieces`` say what lies where in it.

    ``tensor`` is what torch's loader is given: the DTensor around it, or itself.
    """

    tensor: Any
    local: Any
    pieces: tuple[Piece, ...]


class Check:
    """One rank's part in the check of one reshard."""

    def __init__(self, prepared: PreparedReshard, ranks: Ranks) -> None:
        report, transfer = prepared.report, prepared.transfer
        placements = {name: choice.placements for name, choice in report.choices.items()}
        self._placed = Placed(report.mesh, placements)
        self._ranks = ranks
        self._files = transfer.plan.layout.files
        self.target = Path(str(transfer.target))
        self.rank = ranks.rank
        self.mesh = _device_mesh(report.mesh)
        self._entries = transfer.plan.entries
        self._gatherer = Gatherer(transfer.opened.source)

    def close(self) -> None:
        self._gatherer.close()

    def together(self, work: Callable[[], Value]) -> Value:
        return self._ranks.together(work)

    def groups(self, suffix: str) -> Iterator[list[TensorEntry]]:
        """The tensors that lie in files with ``suffix``, a bounded number of bytes at a time."""
        files = [file for file in self._files if file.path.endswith(suffix)]
        parts = [part for file in files for part in file.parts]
        names = {part.name for part in parts if isinstance(part, Data | Scattered)}
        group: list[TensorEntry] = []
        total = 0
        for entry in self._entries:
            if entry.name not in names:
                continue
            nbytes = max(math.prod(shard.shape) for shard in self._placed.shards(entry))
            if group and total + nbytes * entry.dtype.itemsize > _GROUP:
                yield group
                group, total = [], 0
            group.append(entry)
            total += nbytes * entry.dtype.itemsize
        if group:
            yield group

    def require_all_files(self) -> None:
        """Unsupported where this rank does not see all of the output."""
        missing = [file.path for file in self._files if not (self.target / file.path).exists()]
        if missing:
            raise Unsupported(
                f"--check: {self.target}: {missing[0]} not found on rank {self.rank}",
                hint="gather the files of all nodes first, or use --to rank-local",
            )

    def shard(self, entry: TensorEntry) -> LocalShard:
        """What this rank holds of a tensor on the new mesh."""
        return self._placed.shards(entry)[self.rank]

    def placements(self, entry: TensorEntry) -> list[Any]:
        """The tensor's placements as torch's."""
        rank = len(entry.shape)
        return [_torch_placement(item, rank) for item in self._placed.placements[entry.name]]

    def compare(self, entry: TensorEntry, held: LocalTensor) -> None:
        """TransferError where what was loaded is not what the source has."""
        loaded = _bits(held.local, entry.dtype.itemsize)
        for piece in held.pieces:
            shift = tuple(g - l for g, l in zip(piece.box.lo, piece.local.lo, strict=True))
            for box in tiles(piece.box, entry.dtype.itemsize, _TILE):
                wanted = self._gatherer.gathered(entry, box)
                where = box.relative_to(shift)
                found = loaded[tuple(map(slice, where.lo, where.hi))] if where.lo else loaded
                at = _first_difference(wanted, found)
                if at is not None:
                    place = [low + step for low, step in zip(box.lo, at, strict=True)]
                    raise self.differs(entry, f"values different from the source, first at {place}")

    def differs(self, entry: TensorEntry, how: str) -> TransferError:
        return TransferError(
            f"{self.target}: {entry.name}: rank {self.rank} loads {how}",
            hint="do not use this checkpoint; run the reshard again",
        )


def _device_mesh(mesh: Mesh) -> Any:
    """torch's mesh, without a process group a dim: loading needs none, and each costs a meeting."""
    from torch import tensor
    from torch.distributed.device_mesh import DeviceMesh

    ranks = tensor(mesh.ranks).reshape(mesh.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.names, _init_backend=False)


def _bits(tensor: Any, itemsize: int) -> Array:
    """The elements of a torch tensor as bits."""
    import torch

    shape = tuple(tensor.shape)
    if not tensor.numel():
        return np.empty(shape, unit(itemsize))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(flat.view(unit(itemsize)).reshape(shape))


def _first_difference(one: Array, other: Array) -> tuple[int, ...] | None:
    """The first index at which two arrays of bits differ."""
    rows = [
        np.ascontiguousarray(values).reshape(-1).view("u1").reshape(-1, values.itemsize)
        for values in (one, other)
    ]
    different = (rows[0] != rows[1]).any(axis=1)
    if not different.any():
        return None
    return tuple(int(step) for step in np.unravel_index(int(different.argmax()), one.shape))


def _torch_placement(placement: Placement, rank: int) -> Any:
    from torch.distributed.tensor import placement_types as theirs

    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim % rank)
    if isinstance(placement, StridedShard):
        return theirs._StridedShard(placement.dim % rank, split_factor=placement.split_factor)
    if isinstance(placement, Replicate):
        return theirs.Replicate()
    raise Unsupported(f"{placement}: partial values cannot be loaded (sum of ranks)")


def last_line(error: BaseException) -> str:
    """What an error of torch ends with."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
