"""The processes that torchrun started, and how they share a transfer."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from ckptool.engine.share import Share
from ckptool.errors import (
    CkptoolError,
    TransferError,
    Unsupported,
    UsageError,
    error_text,
    failure_of,
)

if TYPE_CHECKING:
    from ckptool.engine.write.stage import Stage

Value = TypeVar("Value")

MEETING = 120.0
"""Seconds within which ranks that were started together must have met."""
_TO_WORK_ALONE = "torchrun sets it; to work alone, unset RANK and WORLD_SIZE"


class Launch(Struct, frozen=True):
    """The position of a process among the ranks of a job, and where they meet (host:port)."""

    rank: int
    size: int
    local_rank: int
    address: str


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch in torchrun's environment variables; None if it did not start the process.

    Raises UsageError if a variable is missing, is not a number, or contradicts the others.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = read_number(environment, "RANK"), read_number(environment, "WORLD_SIZE")
    if rank >= size:
        raise UsageError(f"RANK={rank} of WORLD_SIZE={size}: no such rank", hint=_TO_WORK_ALONE)
    local = read_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0
    host = environment.get("MASTER_ADDR")
    if not host:
        raise UsageError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not", hint=_TO_WORK_ALONE)
    port = read_number(environment, "MASTER_PORT")
    if port > 65535:
        raise UsageError(f"MASTER_PORT={port}: not a port number", hint=_TO_WORK_ALONE)
    return Launch(rank, size, local, f"{host}:{port}")


def read_number(environment: Mapping[str, str], name: str) -> int:
    """Return a variable that is a natural number; UsageError if it is not, or is unset."""
    text = environment.get(name)
    if text is None:
        raise UsageError(f"RANK and WORLD_SIZE are set, but {name} is not", hint=_TO_WORK_ALONE)
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise UsageError(f"{name}={text!r}: not a number", hint=_TO_WORK_ALONE)
    return int(text)


class NodeRanks(Struct, frozen=True):
    """The ranks that write into the same place as this one, out of all ``places``.

    On a shared disk these are all ranks, else the ranks of one machine.
    """

    rank: int
    ranks: tuple[int, ...]
    places: int

    @property
    def leads(self) -> bool:
        """Whether this rank begins and commits."""
        return self.rank == self.ranks[0]

    @property
    def share(self) -> Share:
        """This rank's share of all work at the node."""
        return Share(self.ranks.index(self.rank), len(self.ranks))


class Ranks:
    """One process by itself, with nothing to agree on."""

    rank = 0
    size = 1
    local_rank = 0

    def gather(self, value: Value) -> list[Value]:
        """Return what every rank passed, in rank order."""
        return [value]

    def together(self) -> AbstractContextManager[None]:
        """Work on all ranks; if that fails on any, every rank raises the first one's error."""
        return nullcontext()

    def begin(self, stage: Stage) -> NodeRanks:
        """Begin the output in each place that ranks write into; raises as ``Stage.begin`` does."""
        stage.begin()
        return NodeRanks(0, (0,), places=1)


class TorchRanks(Ranks):
    """The ranks of a torchrun job, over gloo.

    torch waits beyond the reach of signals: it does so on threads of its own.
    """

    _after_loss = "their messages say why; the same command with --resume continues"

    def __init__(self, launch: Launch) -> None:
        import torch.distributed as distributed
        import torch.distributed.nn  # noqa: F401 (must precede the group: it keeps WORLD in defaults)

        self._distributed = distributed
        self._group: Any = None
        self.rank, self.size = launch.rank, launch.size
        self.local_rank = launch.local_rank
        try:
            wait_for(lambda: distributed.init_process_group("gloo"), MEETING)
        except TimeoutError:
            raise _no_meeting(launch, f"within {MEETING:g} s") from None
        except (RuntimeError, ValueError, OSError) as error:
            raise _no_meeting(launch, f"({error_text(error)})") from None

    def gather(self, value: Value) -> list[Value]:
        """Return what every rank passed, in rank order."""
        values: list[Value | None] = [None] * self.size
        try:
            wait_for(lambda: self._distributed.all_gather_object(values, value, self._group))
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank}: lost the connection to other ranks: {error_text(error)}",
                hint=self._after_loss,
            ) from None
        return values  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work on all ranks; if that fails on any, every rank raises the first one's error."""
        failure: CkptoolError | None = None
        try:
            yield
        except CkptoolError as error:
            failure = error
        except OSError as error:
            failure = failure_of(error)
        report = None if failure is None else (type(failure), failure.message, failure.hint)
        for rank, failed in enumerate(self.gather(report)):
            if failed is not None:
                kind, message, hint = failed
                raise kind(f"rank {rank}: {message}", hint=hint) from failure

    def begin(self, stage: Stage) -> NodeRanks:
        """Begin the output in each place that ranks write into; each will hold all of it.

        Raises as ``Stage.begin`` does, TransferError if a rank sees no output that was begun.
        """
        tokens = self.gather(os.urandom(8).hex())
        self._begin_if(stage, tokens, leads=self.rank == 0)
        # who does not see what rank 0 began writes to another disk
        is_apart = not stage.target.is_marked(tokens[0])
        if any(self.gather(is_apart)):
            self._begin_if(stage, tokens, leads=is_apart and self.local_rank == 0)
        with self.together():
            first = self._first_of(stage, tokens)
        firsts = self.gather(first)
        members = tuple(rank for rank, leader in enumerate(firsts) if leader == first)
        return NodeRanks(self.rank, members, len(set(firsts)))

    def _begin_if(self, stage: Stage, tokens: list[str], *, leads: bool) -> None:
        """Begin the output if this rank ``leads``, and mark it with its token."""
        with self.together():
            if leads:
                stage.begin()
                stage.target.mark(tokens[self.rank])

    def _first_of(self, stage: Stage, tokens: list[str]) -> int:
        """Return the rank that began the output where this rank writes."""
        for rank, token in enumerate(tokens):
            if stage.target.is_marked(token):
                return rank
        raise TransferError(
            f"rank {self.rank} does not see the output that a rank of its node began",
            hint="torchrun gives the first rank of each node LOCAL_RANK=0",
        )

    def close(self) -> None:
        """End the process group, once its threads have nothing left to do.

        Groups that are garbage still own threads; gloo (torch 2.13) aborts the process if the
        interpreter exits before they are collected.
        """
        self._distributed.destroy_process_group(self._group)
        gc.collect()


class RunningRanks(TorchRanks):
    """The ranks of a program's existing process group, over a group of their own."""

    _after_loss = "their messages say why"

    def __init__(self) -> None:
        import torch.distributed as distributed

        self._distributed = distributed
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        is_local = os.environ.get("LOCAL_RANK", "").isdecimal()
        self.local_rank = read_number(os.environ, "LOCAL_RANK") if is_local else self.rank
        try:
            self._group = wait_for(lambda: distributed.new_group(backend="gloo"), MEETING)
        except (TimeoutError, RuntimeError, ValueError) as error:
            why = f"within {MEETING:g} s" if isinstance(error, TimeoutError) else error_text(error)
            raise Unsupported(
                f"rank {self.rank} of {self.size} reached no other ranks: {why}",
                hint="all ranks of the process group must call this, even those that hold nothing;"
                " a single rank can save in a format without rank files, such as safetensors",
            ) from None


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the ranks of the torchrun job of this process; without one, be the only rank.

    Raises UsageError if torchrun's environment is invalid, Unsupported if the other ranks cannot be
    reached.
    """
    launch = read_launch(os.environ)
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
        f"rank {launch.rank} of {launch.size} reached no other rank at {launch.address} {why}",
        hint="start it with torchrun; to work alone, unset RANK and WORLD_SIZE",
    )


def wait_for(work: Callable[[], Value], seconds: float | None = None) -> Value:
    """Do work that may block outside Python on a separate thread, so that signals end the wait.

    Raises what the work raises, TimeoutError if it takes longer than ``seconds``; it then continues
    in the background.
    """
    from concurrent.futures import Future

    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)
