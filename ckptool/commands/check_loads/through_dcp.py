"""Load shards as DTensors through torch.distributed.checkpoint.

torch 2.13 gives a DTensor of unevenly strided shards one box with a wrong place, or a shard of
several row ranges one box at all (``compute_local_shape_and_global_offset``). Such a tensor is
loaded whole instead, and the rank's own part of it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptool.commands.check_loads.loading import Check, Held, last_line
from ckptool.core.catalog import TensorEntry
from ckptool.core.shards import LocalShard, Piece
from ckptool.errors import TransferError


def check_dcp(check: Check) -> None:
    """By torch's FileSystemReader."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    _check_through_dcp(check, ".distcp", lambda: FileSystemReader(check.target))


def check_dcp_safetensors(check: Check) -> None:
    """By torch's HuggingFaceStorageReader."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader
    _check_through_dcp(check, ".safetensors", lambda: reader(str(check.target)))


def _check_through_dcp(check: Check, suffix: str, reader: Callable[[], Any]) -> None:
    check.together(check.require_all_files)
    for group in check.groups(suffix):
        _check_group(check, group, reader)


def _check_group(check: Check, group: Sequence[TensorEntry], reader: Callable[[], Any]) -> None:
    held = check.together(lambda: {entry.name: _empty(check, entry) for entry in group})
    check.together(lambda: _load(check.target, {n: h.tensor for n, h in held.items()}, reader()))

    def compare() -> None:
        for entry in group:
            check.compare(entry, held[entry.name])

    check.together(compare)


def _load(target: Path, state: dict[str, Any], reader: Any) -> None:
    """``dcp.load``; its ranks talk to one another, so that they fail together too."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(state, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise TransferError(f"{target}: torch cannot load it: {last_line(error)}") from error


def _empty(check: Check, entry: TensorEntry) -> Held:
    """Memory for this rank's shard and a DTensor around it; for the whole where torch errs."""
    import torch
    from torch.distributed.tensor import DTensor

    dtype, shard = getattr(torch, entry.dtype.name), check.shard(entry)
    placements = check.placements(entry)
    if not _torch_agrees(entry.shape, shard, check.mesh, placements):
        whole = torch.empty(entry.shape, dtype=dtype)
        return Held(whole, whole, tuple(Piece(piece.box, piece.box) for piece in shard.pieces))
    local = torch.empty(shard.shape, dtype=dtype)
    meta = torch.empty(entry.shape, dtype=dtype, device="meta")
    tensor = DTensor.from_local(
        local, check.mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride()
    )
    return Held(tensor, local, shard.pieces)


def _torch_agrees(shape: tuple[int, ...], shard: LocalShard, mesh: Any, placed: list[Any]) -> bool:
    """Whether torch's loader will look for the shard where it is: one box, in the right place."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(shape, mesh, placed)
    if tuple(size) != shard.shape or len(shard.pieces) > 1:
        return False
    return not shard.pieces or shard.pieces[0].box.lo == tuple(offset)
