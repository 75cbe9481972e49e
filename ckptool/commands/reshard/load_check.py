"""Load the output of a reshard through torch itself, and compare it with the source.

Every rank loads its own shards, as a training job on the new mesh would. torch 2.13
(``compute_local_shape_and_global_offset``) gives a DTensor of unevenly strided shards one misplaced
box, and a shard of several row ranges only one box. Such a tensor is loaded whole instead, and the
rank's own part of it is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ckptool.core.box import Box, Piece
from ckptool.core.catalog import Index, TensorEntry
from ckptool.core.layout import Data, tiles
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import LocalShard
from ckptool.engine.ranks import Ranks
from ckptool.engine.read.gather import unit
from ckptool.engine.read.numbers import Array, part_of
from ckptool.engine.read.tensors import TensorReader
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.place import on_disk

if TYPE_CHECKING:
    from ckptool.commands.reshard.reshard import Reshard

_GROUP = 256 << 20
"""Bytes of tensors that a rank loads at a time."""
_TILE = 1 << 20


def require_loadable(reshard: Reshard, ranks: Ranks) -> None:
    """Raise Unsupported, before anything is written, if these ranks cannot load the result."""
    target, size = reshard.report.target_format, reshard.report.mesh.size
    if target not in _LOADERS:
        raise Unsupported(
            f"--check: torch cannot load {target}",
            hint="supported: " + ", ".join(_LOADERS),
        )
    if on_disk(reshard.target) is None:
        raise Unsupported(
            "--check needs a target on local disk, not a URL",
            hint="compare with `ckptool verify SRC --against DST`",
        )
    if ranks.size != size:
        raise Unsupported(
            f"--check: the mesh has {size} ranks, but {ranks.size} are running",
            hint=f"torchrun --nproc-per-node {size} -m ckptool reshard ...",
        )


def check_loads(reshard: Reshard, ranks: Ranks) -> None:
    """Load the written checkpoint through torch, each rank its shards, and compare every bit.

    Raises Unsupported if these ranks cannot load the result, TransferError if torch fails or its
    values differ from the source; the same on every rank. Values are gathered from the source
    again; tensors are loaded a few at a time.
    """
    require_loadable(reshard, ranks)
    with _process_group():
        with ranks.together():
            check = Check(reshard, ranks)
        try:
            _LOADERS[reshard.report.target_format](check)
        finally:
            check.close()


@contextmanager
def _process_group() -> Iterator[None]:
    """Use the existing process group, or one of this process alone."""
    try:
        import torch.distributed as distributed
        from torch._C._distributed_c10d import HashStore
    except ImportError:
        raise Unsupported("--check needs torch", hint="pip install 'ckptool[torch]'") from None
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


# One rank's part


class LoadedTensor(Struct, frozen=True):
    """A rank's part of a tensor: ``local`` is its memory, ``pieces`` locate boxes in it.

    ``tensor`` is what torch's loader gets: the DTensor around it, or itself.
    """

    tensor: Any
    local: Any
    pieces: tuple[Piece, ...]


class Check:
    """One rank's part in the check of one reshard."""

    def __init__(self, reshard: Reshard, ranks: Ranks) -> None:
        self._placed = reshard.placed
        self._files = reshard.plan.layout.files
        self._entries = reshard.plan.entries
        self._reader = TensorReader(reshard.opened.source)
        self.target = Path(str(reshard.target))
        self.rank = ranks.rank
        self.together = ranks.together
        self.mesh = _device_mesh(reshard.report.mesh)

    def close(self) -> None:
        self._reader.close()

    def groups(self, suffix: str) -> Iterator[list[TensorEntry]]:
        """Yield the tensors in files with ``suffix``, a bounded number of bytes at a time."""
        files = [file for file in self._files if file.path.endswith(suffix)]
        parts = [part for file in files for part in file.parts]
        names = {part.name for part in parts if isinstance(part, Data)}
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
        """Raise Unsupported if this rank does not see all of the output."""
        missing = [file.path for file in self._files if not (self.target / file.path).exists()]
        if missing:
            raise Unsupported(
                f"--check: {self.target}: {missing[0]} not found on rank {self.rank}",
                hint="gather the files of all nodes first, or use --to rank-local",
            )

    def shard(self, entry: TensorEntry) -> LocalShard:
        """Return this rank's part of a tensor on the new mesh."""
        return self._placed.shards(entry)[self.rank]

    def placements(self, entry: TensorEntry) -> list[Any]:
        """Return the tensor's placements as torch's."""
        rank = len(entry.shape)
        return [_torch_placement(item, rank) for item in self._placed.placements[entry.name]]

    def compare(self, entry: TensorEntry, loaded: LoadedTensor) -> None:
        """Raise TransferError if the loaded data differs from the source's."""
        bits = _bits(loaded.local, entry.dtype.itemsize)
        for piece in loaded.pieces:
            shift = tuple(g - l for g, l in zip(piece.box.lo, piece.local.lo, strict=True))
            for box in tiles(piece.box, entry.dtype.itemsize, _TILE):
                original = self._reader.elements.gather(entry, box)
                part = part_of(bits, box.relative_to(shift))
                at = _first_difference(original, part)
                if at is not None:
                    place = [low + step for low, step in zip(box.lo, at, strict=True)]
                    raise self.differs(entry, f"values different from the source, first at {place}")

    def differs(self, entry: TensorEntry, how: str) -> TransferError:
        return TransferError(
            f"{self.target}: {entry.name}: rank {self.rank} loads {how}",
            hint="do not use this checkpoint; run the reshard again",
        )


def _device_mesh(mesh: Mesh) -> Any:
    """Return torch's mesh, without the process group per dim, which loading does not need."""
    from torch import tensor
    from torch.distributed.device_mesh import DeviceMesh

    ranks = tensor(mesh.ranks).reshape(mesh.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.names, _init_backend=False)


def _bits(tensor: Any, itemsize: int) -> Array:
    """Return the elements of a torch tensor as bits."""
    import torch

    shape = tuple(tensor.shape)
    if not tensor.numel():
        return np.empty(shape, unit(itemsize))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(flat.view(unit(itemsize)).reshape(shape))


def _first_difference(a: Array, b: Array) -> tuple[int, ...] | None:
    """Return the first index at which two arrays of bits differ."""
    rows = [
        np.ascontiguousarray(values).reshape(-1).view("u1").reshape(-1, values.itemsize)
        for values in (a, b)
    ]
    different = (rows[0] != rows[1]).any(axis=1)
    if not different.any():
        return None
    return tuple(int(step) for step in np.unravel_index(int(different.argmax()), a.shape))


def _torch_placement(placement: Placement, rank: int) -> Any:
    from torch.distributed.tensor import placement_types as theirs

    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim % rank)
    if isinstance(placement, StridedShard):
        return theirs._StridedShard(placement.dim % rank, split_factor=placement.split_factor)
    if isinstance(placement, Replicate):
        return theirs.Replicate()
    raise Unsupported(f"{placement}: partial values cannot be loaded (sum of ranks)")


@contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Turn any error of torch into a TransferError with the last line of its message."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TransferError(f"{path}: torch cannot load it: {lines[-1]}") from error


# Ways to load


def _check_rank_file(check: Check) -> None:
    """Check this rank's file through ``torch.load``; mapped, so that values are read one by one."""
    with check.together():
        state = _own_file(check.target / f"checkpoint_{check.rank}.pt")
    with check.together():
        for group in check.groups(f"checkpoint_{check.rank}.pt"):
            for entry in group:
                check.compare(entry, _local_tensor(check, entry, state))


def _own_file(path: Path) -> Any:
    import torch

    with _loading(path):
        return torch.load(path, weights_only=True, mmap=True)


def _local_tensor(check: Check, entry: TensorEntry, state: Any) -> LoadedTensor:
    """Return a tensor of the file; TransferError unless it has the right placements and shape."""
    from torch.distributed.tensor import DTensor

    for step in entry.path:
        state = state[step.position if isinstance(step, Index) else step]
    name = str(state.dtype).removeprefix("torch.")
    if (tuple(state.shape), name) != (entry.shape, entry.dtype.name):
        raise check.differs(entry, f"{name} {list(state.shape)}")
    if not isinstance(state, DTensor):
        pieces = (Piece(Box.whole(entry.shape), Box.whole(entry.shape)),)
        return LoadedTensor(state, state, pieces if entry.elements else ())
    shard, local, mesh = check.shard(entry), state.to_local(), state.device_mesh
    if tuple(local.shape) != shard.shape or list(state.placements) != check.placements(entry):
        raise check.differs(entry, f"{list(local.shape)} placed {state.placements}")
    if (mesh.shape, mesh.mesh_dim_names) != (check.mesh.shape, check.mesh.mesh_dim_names):
        raise check.differs(entry, f"device mesh {mesh}")
    return LoadedTensor(state, local, shard.pieces)


def _check_through_dcp(check: Check, suffix: str, reader: str) -> None:
    """Check the tensors in files with ``suffix`` by a storage reader of torch (module:class)."""
    module, _, name = reader.partition(":")
    with check.together():
        check.require_all_files()
    for group in check.groups(suffix):
        _check_group(check, group, getattr(import_module(module), name))


def _check_group(check: Check, group: Sequence[TensorEntry], reader: Callable[[str], Any]) -> None:
    with check.together():
        tensors = {entry.name: _empty(check, entry) for entry in group}
    state = {name: local.tensor for name, local in tensors.items()}
    with check.together():
        _load(check.target, state, reader(str(check.target)))
    with check.together():
        for entry in group:
            check.compare(entry, tensors[entry.name])


def _load(target: Path, state: dict[str, Any], reader: Any) -> None:
    """Call ``dcp.load``, whose ranks communicate, so that they also fail together."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with _loading(target):
        load(state, storage_reader=reader)


def _empty(check: Check, entry: TensorEntry) -> LoadedTensor:
    """Allocate this rank's shard and a DTensor around it; the whole tensor where torch is wrong."""
    import torch
    from torch.distributed.tensor import DTensor

    dtype, shard = getattr(torch, entry.dtype.name), check.shard(entry)
    placements = check.placements(entry)
    if not _torch_agrees(entry.shape, shard, check.mesh, placements):
        whole = torch.empty(entry.shape, dtype=dtype)
        return LoadedTensor(
            whole, whole, tuple(Piece(piece.box, piece.box) for piece in shard.pieces)
        )
    local = torch.empty(shard.shape, dtype=dtype)
    meta = torch.empty(entry.shape, dtype=dtype, device="meta")
    tensor = DTensor.from_local(
        local, check.mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride()
    )
    return LoadedTensor(tensor, local, shard.pieces)


def _torch_agrees(shape: tuple[int, ...], shard: LocalShard, mesh: Any, placed: list[Any]) -> bool:
    """Return whether torch's loader expects the shard at its place, as one box."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(shape, mesh, placed)
    if tuple(size) != shard.shape or len(shard.pieces) > 1:
        return False
    return not shard.pieces or shard.pieces[0].box.lo == tuple(offset)


_LOADERS: dict[str, Callable[[Check], None]] = {
    "dcp": partial(
        _check_through_dcp,
        suffix=".distcp",
        reader="torch.distributed.checkpoint.filesystem:FileSystemReader",
    ),
    "dcp-safetensors": partial(
        _check_through_dcp,
        suffix=".safetensors",
        reader="torch.distributed.checkpoint.hf_storage:HuggingFaceStorageReader",
    ),
    "rank-local": _check_rank_file,
}
"""The function that loads and compares each target format."""
