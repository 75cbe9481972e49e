"""Load what a reshard wrote through torch itself, and compare it with the source.

Every rank loads its own shards, as a training job on the new mesh would.

Load a rank's own file by ``torch.load``.

Load shards as DTensors through torch.distributed.checkpoint.

torch 2.13 gives a DTensor of unevenly strided shards one box with a wrong place, or a shard of
several row ranges one box at all (``compute_local_shape_and_global_offset``). Such a tensor is
loaded whole instead, and the rank's own part of it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptool.commands.reshard.load_check_rank import Check, LocalTensor, last_line
from ckptool.commands.reshard.reshard import PreparedReshard
from ckptool.core.box import Box
from ckptool.core.catalog import Index, TensorEntry
from ckptool.core.sharding.dtensor import LocalShard, Piece
from ckptool.engine.ranks import Ranks
from ckptool.errors import TransferError, Unsupported


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


def _found(check: Check, entry: TensorEntry, state: Any) -> LocalTensor:
    """A tensor of the file, once it is known to be placed and shaped as it should be."""
    from torch.distributed.tensor import DTensor

    for step in entry.path:
        state = state[step.position if isinstance(step, Index) else step]
    name = str(state.dtype).removeprefix("torch.")
    if (tuple(state.shape), name) != (entry.shape, entry.dtype.name):
        raise check.differs(entry, f"{name} {list(state.shape)}")
    if not isinstance(state, DTensor):
        pieces = (Piece(Box.whole(entry.shape), Box.whole(entry.shape)),)
        return LocalTensor(state, state, pieces if entry.elements else ())
    shard, local, mesh = check.shard(entry), state.to_local(), state.device_mesh
    if tuple(local.shape) != shard.shape or list(state.placements) != check.placements(entry):
        raise check.differs(entry, f"{list(local.shape)} placed {state.placements}")
    if (mesh.shape, mesh.mesh_dim_names) != (check.mesh.shape, check.mesh.mesh_dim_names):
        raise check.differs(entry, f"device mesh {mesh}")
    return LocalTensor(state, local, shard.pieces)


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


def _empty(check: Check, entry: TensorEntry) -> LocalTensor:
    """Memory for this rank's shard and a DTensor around it; for the whole where torch errs."""
    import torch
    from torch.distributed.tensor import DTensor

    dtype, shard = getattr(torch, entry.dtype.name), check.shard(entry)
    placements = check.placements(entry)
    if not _torch_agrees(entry.shape, shard, check.mesh, placements):
        whole = torch.empty(entry.shape, dtype=dtype)
        return LocalTensor(
            whole, whole, tuple(Piece(piece.box, piece.box) for piece in shard.pieces)
        )
    local = torch.empty(shard.shape, dtype=dtype)
    meta = torch.empty(entry.shape, dtype=dtype, device="meta")
    tensor = DTensor.from_local(
        local, check.mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride()
    )
    return LocalTensor(tensor, local, shard.pieces)


def _torch_agrees(shape: tuple[int, ...], shard: LocalShard, mesh: Any, placed: list[Any]) -> bool:
    """Whether torch's loader will look for the shard where it is: one box, in the right place."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(shape, mesh, placed)
    if tuple(size) != shard.shape or len(shard.pieces) > 1:
        return False
    return not shard.pieces or shard.pieces[0].box.lo == tuple(offset)


def require_loadable(prepared: PreparedReshard, ranks: Ranks) -> None:
    """Unsupported where the result cannot be loaded by these ranks: ask before it is written."""
    target, size = prepared.report.target_format, prepared.report.mesh.size
    if target not in _LOADERS:
        raise Unsupported(
            f"--check: torch cannot load {target}",
            hint="supported: " + ", ".join(_LOADERS),
        )
    if not isinstance(prepared.report.target, Path):
        raise Unsupported(
            "--check needs a target on local disk, not a URL",
            hint="compare with `ckptool verify SRC --against DST`",
        )
    if ranks.size != size:
        raise Unsupported(
            f"--check: the mesh has {size} ranks, but {ranks.size} are running",
            hint=f"torchrun --nproc-per-node {size} -m ckptool reshard ...",
        )


def check_loads(prepared: PreparedReshard, ranks: Ranks) -> None:
    """Load the written checkpoint through torch, each rank its shards, and compare every bit.

    Raises Unsupported where the result cannot be loaded by these ranks, and TransferError where
    torch fails or finds other values than the source has; on every rank the same. Values are
    gathered from the source anew; tensors are loaded a few at a time.
    """
    require_loadable(prepared, ranks)
    with _process_group():
        check = ranks.together(lambda: Check(prepared, ranks))
        try:
            _LOADERS[prepared.report.target_format](check)
        finally:
            check.close()


@contextmanager
def _process_group() -> Iterator[None]:
    """The process group that there is; for one process by itself a group of one."""
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


_LOADERS: dict[str, Callable[[Check], None]] = {
    "dcp": check_dcp,
    "dcp-safetensors": check_dcp_safetensors,
    "rank-local": check_rank_file,
}
"""What loads and compares each target format."""
