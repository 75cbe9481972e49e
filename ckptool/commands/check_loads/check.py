"""Load what a reshard wrote through torch itself, and compare it with the source.

Every rank loads its own shards, as a training job on the new mesh would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptool.commands.check_loads.loading import Check
from ckptool.commands.check_loads.rank_files import check_rank_file
from ckptool.commands.check_loads.through_dcp import check_dcp, check_dcp_safetensors
from ckptool.commands.reshard import PreparedReshard
from ckptool.engine.ranks import Ranks
from ckptool.errors import CannotDo


def require_loadable(prepared: PreparedReshard, ranks: Ranks) -> None:
    """CannotDo where the result cannot be loaded by these ranks: ask before it is written."""
    target, size = prepared.report.target_format, prepared.report.mesh.size
    if target not in _LOADERS:
        raise CannotDo(
            f"--check: torch has no loader of its own for {target}",
            hint="it checks " + ", ".join(_LOADERS),
        )
    if not isinstance(prepared.report.target, Path):
        raise CannotDo(
            "--check loads through torch from a disk, and the target is a URL",
            hint="ckptool verify SRC --against DST compares them",
        )
    if ranks.size != size:
        raise CannotDo(
            f"--check: the mesh has {size} ranks, this is a run of {ranks.size}",
            hint=f"torchrun --nproc-per-node {size} -m ckptool reshard ...",
        )


def check_loads(prepared: PreparedReshard, ranks: Ranks) -> None:
    """Load the written checkpoint through torch, each rank its shards, and compare every bit.

    Raises CannotDo where the result cannot be loaded by these ranks, and TransferError where torch
    fails or finds other values than the source has; on every rank the same. Values are gathered
    from the source anew; tensors are loaded a few at a time.
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
        raise CannotDo("--check needs torch", hint="pip install 'ckptool[torch]'") from None
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
