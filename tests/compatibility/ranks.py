"""The common part of the programs here: ranks on gloo, the training loop, and losses."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SAVED, LAST = 2, 5
"""The step after which ``write`` saves, and the one that ``resume`` ends with."""
FORGOTTEN = "the optimizer starts anew"
"""Printed with the losses where loading left the optimizer without any state."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how its framework saves and loads it.

    ``loss`` gives that of one step, counted from 0, alike on all numbers of ranks.
    """

    optimizer: Any
    scheduler: Any
    loss: Callable[[int], Any]
    save: Callable[[], None]
    load: Callable[[], None]


Program = Callable[[str, str, int, int], Any]
"""Called on every rank with ``write`` or ``resume``, the path, the rank, and how many there are."""


def spawn(program: Program) -> None:
    """Run a program on as many ranks as requested, and print what each of them returns.

    Arguments: ``write`` or ``resume``, the checkpoint's path, the number of ranks; then a program's
    own.
    """
    import torch.multiprocessing as mp

    mode, path, world = sys.argv[1:4]
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (program, mode, path, int(world), f"{meeting}/store")
        # forked, ranks need not import again what the program has imported
        mp.start_processes(_rank, args=arguments, nprocs=int(world), start_method="fork")


def _rank(rank: int, program: Program, mode: str, path: str, world: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mine = program(mode, path, rank, world)
    found = [None] * world
    dist.all_gather_object(found, mine)
    if rank == 0:
        print("LOSSES", found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(build: Callable[[str], Job], mode: str, path: str, rank: int, world: int) -> Any:
    """Train ``build(path)``, and save or resume.

    Returns the losses, the schedule, what was forgotten, and the next random numbers.

    The last only where ranks are as many as saved: others have no states of their own.
    """
    import numpy as np
    import torch

    job = build(path)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank + 9 * (mode == "write"))
    forgotten = None
    if mode == "resume":
        job.load()
        optimizers = getattr(job.optimizer, "optimizers", [job.optimizer])
        forgotten = None if all(one.state for one in optimizers) else FORGOTTEN
    losses = []
    for step in range(SAVED) if mode == "write" else range(SAVED, LAST):
        loss = job.loss(step)
        loss.backward()
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
        losses.append(loss.item().hex())
    if mode == "write":
        job.save()
    draws = [torch.rand(1).item(), random.random(), np.random.rand()]
    return losses, job.scheduler.state_dict(), forgotten, draws if world == 2 else None
