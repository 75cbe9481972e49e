"""The processes that torchrun started, as far as a transfer needs them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ckptool.core.layout import Layout
from ckptool.engine.launch import Launch, launch_of
from ckptool.engine.threads import wait_for
from ckptool.errors import CkptoolError, TransferError, Unsupported
from ckptool.storage.retry import error_text

Value = TypeVar("Value")

MEETING = 120.0
"""Seconds after which ranks that were started together must have met."""


class Ranks:
    """One process by itself: nothing to agree on."""

    rank = 0
    size = 1
    local_rank = 0

    def gather(self, value: Value) -> list[Value]:
        """What every rank passed, in the order of ranks."""
        return [value]

    def together(self, work: Callable[[], Value]) -> Value:
        """Do ``work``; where it fails on any rank, every rank raises the first one's error."""
        return work()


class TorchRanks(Ranks):
    """The ranks of a torchrun job, over gloo.

    torch waits beyond the reach of signals: it does so on threads of its own.
    """

    def __init__(self, launch: Launch) -> None:
        import torch.distributed as distributed
        import torch.distributed.nn  # noqa: F401 (must precede the group: it keeps WORLD in defaults)

        self._distributed = distributed
        self.rank, self.size = launch.rank, launch.size
        self.local_rank = launch.local_rank
        try:
            wait_for(lambda: distributed.init_process_group("gloo"), MEETING)
        except TimeoutError:
            raise _no_meeting(launch, f"within {MEETING:g} s") from None
        except (RuntimeError, ValueError, OSError) as error:
            raise _no_meeting(launch, f"({error_text(error)})") from None

    def gather(self, value: Value) -> list[Value]:
        """What every rank passed, in the order of ranks."""
        values: list[Value | None] = [None] * self.size
        try:
            wait_for(lambda: self._distributed.all_gather_object(values, value))
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank}: the other ranks are lost: {error_text(error)}",
                hint="what they say tells why; the same command with --resume continues",
            ) from None
        return values  # type: ignore[return-value]

    def together(self, work: Callable[[], Value]) -> Value:
        """Do ``work``; where it fails on any rank, every rank raises the first one's error."""
        failure: CkptoolError | None = None
        try:
            result = work()
        except CkptoolError as error:
            failure = error
        except OSError as error:
            failure = TransferError(str(error))
        for rank, other in enumerate(self.gather(_as_report(failure))):
            if other is not None:
                kind, message, hint = other
                raise kind(f"rank {rank}: {message}", hint=hint) from failure
        return result

    def close(self) -> None:
        """End the process group, once its threads have nothing left to do.

        Groups that lie in garbage still own threads; gloo (torch 2.13) aborts the process when the
        interpreter ends before they are collected.
        """
        self._distributed.destroy_process_group()
        gc.collect()


def _as_report(error: CkptoolError | None) -> tuple[type[CkptoolError], str, str | None] | None:
    return None if error is None else (type(error), error.message, error.hint)


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The ranks torchrun started this process among, or this process alone.

    Raises UsageError where the environment that torchrun sets makes no sense, Unsupported where the
    other ranks cannot be met.
    """
    launch = launch_of(os.environ)
    if launch is None:
        yield Ranks()
        return
    try:
        group = TorchRanks(launch)
    except ImportError:
        raise Unsupported(
            "under torchrun ckptool needs torch", hint="pip install 'ckptool[torch]'"
        ) from None
    try:
        yield group
    except Exception:
        group.close()
        raise
    # A signal leaves the group as it is: a thread may still wait in it.
    group.close()


def _no_meeting(launch: Launch, why: str) -> Unsupported:
    return Unsupported(
        f"rank {launch.rank} of {launch.size} meets no other rank at {launch.address} {why}",
        hint="start it with torchrun; to work alone, unset RANK and WORLD_SIZE",
    )


def share(layout: Layout, rank: int, size: int, mesh_size: int | None) -> list[int]:
    """The places in the layout of the files that ``rank`` of ``size`` writes.

    Where there are as many ranks as the mesh has, each writes its own files; else files go to the
    rank with the fewest bytes so far. What belongs to all ranks is written by rank 0.
    """
    if size == mesh_size:
        owners = [file.rank or 0 for file in layout.files]
    else:
        owners = _balanced([file.nbytes for file in layout.files], size)
    return [
        number
        for number, file in enumerate(layout.files)
        if rank == (0 if file.rank is None else owners[number])
    ]


def _balanced(sizes: Sequence[int], count: int) -> list[int]:
    load = [0] * count
    owners = []
    for size in sizes:
        owner = load.index(min(load))
        load[owner] += size
        owners.append(owner)
    return owners
