"""What the programs beside this share: ranks on gloo, the same data on each, and their losses."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

SAVED, LAST = 2, 5
"""The step after which ``write`` saves, and the one that ``resume`` ends with."""


def start(program: Callable[[str, str], Any]) -> None:
    """Run ``program(mode, path)`` on as many ranks as asked, and print what each returns.

    Arguments: ``write`` or ``resume``, the checkpoint's path, the number of ranks.
    """
    import torch.multiprocessing as mp

    mode, path, world = sys.argv[1:]
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (program, mode, path, int(world), f"{meeting}/store")
        mp.spawn(_rank, args=arguments, nprocs=int(world))


def _rank(
    rank: int, program: Callable[[str, str], Any], mode: str, path: str, world: int, meeting: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mine = program(mode, path)
    found = [None] * world
    dist.all_gather_object(found, mine)
    if rank == 0:
        print("LOSSES", found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def steps_of(mode: str) -> range:
    return range(SAVED) if mode == "write" else range(SAVED, LAST)
