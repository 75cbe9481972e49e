"""Whether what was saved is what there was when the save was called."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.commands.bench.files import make_durable, remove
from ckptool.commands.bench.store import named
from ckptool.commands.bench.strategies.base import State, Strategy
from ckptool.commands.bench.worker.training import Training, shards
from ckptool.storage.url import Location

CONSISTENT, DIRTY = "consistent", "DIRTY"
_LOOK = 0.005


@dataclass(frozen=True, slots=True)
class Consistency:
    """What a finished checkpoint held whose parameters were changed during the save.

    ``changed`` says when: ``after the call`` returned, or ``once staged`` where the library wants
    that awaited. ``tensors`` are those that were not as at the call, of ``of`` in all. For a
    strategy that wants it awaited, ``at_once`` tells how many are dirty without.
    """

    verdict: str
    changed: str
    tensors: tuple[str, ...]
    of: int
    at_once: int | None = None


def check_consistency(strategy: Strategy, training: Training, path: Location) -> Consistency:
    """Save, change every bit, finish, load back and compare, all ranks together."""
    changed = "once staged" if strategy.must_wait else "after the call"
    dirty = _dirty(strategy, training, path, wait=strategy.must_wait)
    at_once = None
    if strategy.must_wait:
        at_once = len(_dirty(strategy, training, path.with_name("at-once"), wait=False))
    verdict = DIRTY if dirty else CONSISTENT
    return Consistency(verdict, changed, dirty, len(shards(training.state)), at_once)


def _dirty(
    strategy: Strategy, training: Training, path: Location, *, wait: bool
) -> tuple[str, ...]:
    """The tensors that are not what they were at the call."""
    import torch.distributed as dist

    before = snapshot(training.state)
    dist.barrier()
    handle = strategy.save(training.state, named(path))
    if wait:
        handle.staged()
    training.change_everything()
    while not handle.done():
        time.sleep(_LOOK)
    dist.barrier()
    handle.commit()
    make_durable(path)
    dist.barrier()
    different = differing(before, strategy.load(training.empty_state(), named(path)))
    dist.barrier()
    remove(path)
    dist.barrier()
    return different


def snapshot(state: State) -> dict[str, Any]:
    """What this rank holds, copied to the host."""
    return {name: local.detach().to("cpu", copy=True) for name, local in shards(state).items()}


def differing(before: Mapping[str, Any], loaded: State) -> tuple[str, ...]:
    """The names whose bits differ on any rank, the same on every rank; missing ones differ."""
    import torch.distributed as dist

    found = shards(loaded)
    own = {name for name, local in before.items() if not _same(local, found.get(name))}
    all_own: list[set[str]] = [own] * dist.get_world_size()
    dist.all_gather_object(all_own, own)
    return tuple(sorted(set().union(*all_own)))


def _same(one: Any, other: Any) -> bool:
    import torch

    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [tensor.cpu().contiguous().reshape(-1) for tensor in (one, other)]
    return not one.numel() or torch.equal(*(each.view(torch.uint8) for each in flat))
