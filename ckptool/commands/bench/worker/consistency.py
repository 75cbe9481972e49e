"""Whether a save holds what was there at the call, though parameters change while it goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from ckptool.commands.bench.processes import Tell
from ckptool.commands.bench.report import CONSISTENT, DIRTY, Consistency, Difference
from ckptool.commands.bench.save_folders import SaveFolder
from ckptool.commands.bench.strategies.base import State, Strategy
from ckptool.commands.bench.worker.device import gather
from ckptool.commands.bench.worker.pulse import BESIDE, DONE
from ckptool.commands.bench.worker.training import Training, invert, shards

_POLL = 0.005
_MOST_DIFFERENCES = 8
_MOST_RANGES = 4


class Differences(Struct):
    """What of the loaded tensors is not as at the call, on one rank or on all.

    Of ``elements``, ``changed`` are as the parameters were changed to. ``first`` tells the first
    differences.
    """

    names: list[str] = field(default_factory=list)
    elements: int = 0
    changed: int = 0
    first: list[Difference] = field(default_factory=list)

    @property
    def cause(self) -> str | None:
        """Return how the difference came, as far as the elements tell; None without any."""
        if not self.elements:
            return None
        if self.changed == self.elements:
            return "it holds later parameters: it read them after it had let them be changed"
        neither = "neither state: it wrote memory before the copies were there, or something else"
        if not self.changed:
            return f"it holds {neither}"
        return f"of {self.elements:,} elements, {self.changed:,} are later ones, the rest {neither}"


def check_consistency(
    strategy: Strategy, training: Training, folder: SaveFolder, tell: Tell
) -> tuple[Consistency, list[float]]:
    """Save, change every bit, finish, load back and compare, all ranks together.

    Returns also the seconds of each load.
    """
    wait = strategy.must_wait
    differences, seconds = _save_and_change(strategy, training, folder / "checked", tell, wait=wait)
    at_once, loads = None, [seconds]
    if wait:
        early, seconds = _save_and_change(strategy, training, folder / "at-once", tell, wait=False)
        at_once = len(early.names)
        loads.append(seconds)
    consistency = Consistency(
        verdict=DIRTY if differences.names else CONSISTENT,
        changed="once staged" if wait else "after the call",
        tensors=tuple(differences.names),
        of=len(shards(training.state)),
        at_once=at_once,
        cause=differences.cause,
        differences=tuple(differences.first),
    )
    return consistency, loads


def _save_and_change(
    strategy: Strategy, training: Training, path: SaveFolder, tell: Tell, *, wait: bool
) -> tuple[Differences, float]:
    """Return what of the saved tensors is not as it was at the call, and the seconds of the load.

    Copies that the library queues behind the work of the stream that trains are in flight when
    the parameters change, on another stream: what it says to be done must be.
    """
    import torch.distributed as dist

    original = snapshot(training.state)
    dist.barrier()
    training.occupy()
    handle = strategy.save(training.state, path.target)
    if wait:
        handle.staged()
    training.change_everything()
    tell(BESIDE, os.getpid())
    while not handle.done():
        time.sleep(_POLL)
    tell(DONE, None)
    dist.barrier()
    handle.commit()
    path.make_durable()
    dist.barrier()
    empty = training.empty_state()
    training.device.synchronize()
    begin = time.perf_counter()
    loaded = strategy.load(empty, path.target)
    training.device.synchronize()
    seconds = time.perf_counter() - begin
    differences = find_differences(original, loaded)
    remove_together(path)
    return differences, seconds


def remove_together(path: SaveFolder) -> None:
    """Remove a folder once all ranks have come here; all go on when it is gone."""
    import torch.distributed as dist

    dist.barrier()
    if path.disk or dist.get_rank() == 0:  # each node may have its own disk
        path.remove()
    dist.barrier()


def snapshot(state: State) -> dict[str, Any]:
    """Copy what this rank holds to the host."""
    return {name: local.detach().to("cpu", copy=True) for name, local in shards(state).items()}


def find_differences(original: Mapping[str, Any], loaded: State) -> Differences:
    """Return the tensors that differ in any bit or are missing on any rank: the same on each."""
    import torch.distributed as dist

    differences, locals_loaded = Differences(), shards(loaded)
    for name in sorted(original):
        difference = _compare(name, dist.get_rank(), original[name], locals_loaded.get(name))
        if difference is not None:
            differences.names.append(name)
            differences.elements += difference.elements
            differences.changed += difference.changed
            differences.first = [*differences.first, difference][:_MOST_DIFFERENCES]
    ranks = gather(differences)
    return Differences(
        names=sorted({name for rank in ranks for name in rank.names}),
        elements=sum(rank.elements for rank in ranks),
        changed=sum(rank.changed for rank in ranks),
        first=[first for rank in ranks for first in rank.first][:_MOST_DIFFERENCES],
    )


def _compare(name: str, rank: int, original: Any, loaded: Any) -> Difference | None:
    """Compare a shard, element by element, with both states; None if it is as at the call."""
    import torch

    count = original.numel()
    if loaded is None or original.dtype != loaded.dtype or original.shape != loaded.shape:
        return Difference(name, rank, count, count, 0, ((0, count),))
    if not count:
        return None
    then, now = _bytes_of(original), _bytes_of(loaded)
    if torch.equal(then, now):
        return None
    differs = (then != now).any(1)
    inverse = original.clone()
    invert(inverse)
    changed = int(((_bytes_of(inverse) == now).all(1) & differs).sum())
    return Difference(name, rank, int(differs.sum()), count, changed, _ranges(differs))


def _bytes_of(tensor: Any) -> Any:
    """Return the bytes of each element, as rows."""
    import torch

    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).view(flat.numel(), -1)


def _ranges(differs: Any) -> tuple[tuple[int, int], ...]:
    """Return the first runs of true, each from its first element to the one after its last."""
    import torch

    padded = torch.nn.functional.pad(differs.to(torch.int8), (1, 1))
    edges = torch.nonzero(padded[1:] != padded[:-1])[: 2 * _MOST_RANGES].flatten().tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
