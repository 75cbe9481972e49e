"""Load a rank's own file by ``torch.load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptool.commands.check_loads.loading import Check, Held, last_line
from ckptool.core.box import Box
from ckptool.core.catalog import Index, TensorEntry
from ckptool.core.shards import Piece
from ckptool.errors import TransferError


def check_rank_file(check: Check) -> None:
    """This rank's own file by ``torch.load``; it is mapped, so that values are read one by one."""
    state = check.together(lambda: _own_file(check.target / f"checkpoint_{check.rank}.pt"))

    def compare() -> None:
        for group in check.groups(f"checkpoint_{check.rank}.pt"):
            for entry in group:
                check.compare(entry, _found(check, entry, state))

    check.together(compare)


def _own_file(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, weights_only=True, mmap=True)
    except Exception as error:
        raise TransferError(f"{path}: torch cannot load it: {last_line(error)}") from error


def _found(check: Check, entry: TensorEntry, state: Any) -> Held:
    """A tensor of the file, once it is known to be placed and shaped as it should be."""
    from torch.distributed.tensor import DTensor

    for step in entry.path:
        state = state[step.position if isinstance(step, Index) else step]
    name = str(state.dtype).removeprefix("torch.")
    if (tuple(state.shape), name) != (entry.shape, entry.dtype.name):
        raise check.differs(entry, f"{name} {list(state.shape)}")
    if not isinstance(state, DTensor):
        pieces = (Piece(Box.whole(entry.shape), Box.whole(entry.shape)),)
        return Held(state, state, pieces if entry.elements else ())
    shard, local, mesh = check.shard(entry), state.to_local(), state.device_mesh
    if tuple(local.shape) != shard.shape or list(state.placements) != check.placements(entry):
        raise check.differs(entry, f"{list(local.shape)} placed {state.placements}")
    if (mesh.shape, mesh.mesh_dim_names) != (check.mesh.shape, check.mesh.mesh_dim_names):
        raise check.differs(entry, f"it on a mesh {mesh}")
    return Held(state, local, shard.pieces)
