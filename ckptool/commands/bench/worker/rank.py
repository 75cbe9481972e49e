"""One rank of the benchmark: it watches the fresh processes that train and save."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ckptool.commands.bench.abort import abort
from ckptool.commands.bench.files import remove
from ckptool.commands.bench.fork_server import (
    Child,
    Ended,
    Tell,
    Work,
    adopt_orphans,
    die_with_parent,
    end_orphans,
)
from ckptool.commands.bench.jobs import Fresh
from ckptool.commands.bench.specs import Task
from ckptool.commands.bench.store import Meeting
from ckptool.commands.bench.strategies import strategy
from ckptool.commands.bench.worker.device import Accelerators, Device
from ckptool.errors import Unsupported

_OPEN_FILES = 1 << 16

Emit = Callable[[dict[str, Any]], None]


def run_rank(task: Task, meeting: Meeting, emit: Emit) -> None:
    """Do the task as this rank. ``emit`` takes the events, of rank 0 alone."""
    adopt_orphans()
    _allow_open_files()
    os.environ["TMPDIR"] = tempfile.tempdir = task.temporary
    _import_torch()
    try:
        Rank(task, meeting, emit).run()
    finally:
        end_orphans()


def _allow_open_files() -> None:
    """As many as the system lets: every tensor that is shared with a process is an open file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def _import_torch() -> None:
    """Everything heavy, so that no fork imports it anew; none of it starts a device's runtime."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor

    with suppress(ImportError):  # its strategies say why they cannot run
        import torch.distributed.checkpoint._experimental  # noqa: F401


class Rank:
    """The watching process of a rank, in step with those of the other ranks."""

    def __init__(self, task: Task, meeting: Meeting, emit: Emit) -> None:
        self.task = task
        self.meeting = meeting
        self.fresh = Fresh(task, meeting)
        self._emit: Emit = emit if meeting.rank == 0 else lambda event: None

    def run(self) -> None:
        """The limits, then every strategy that can run here."""
        self._emit_progress("limits", "limits")
        found = self.child("limits", self.fresh.limits)
        self._emit({"event": "limits", "limits": found.value, "failure": found.failure})
        if found.value:
            rate = found.value["write"] or found.value["upload"]
            self.task = dataclasses.replace(self.task, write_rate=rate)
            self.fresh = Fresh(self.task, self.meeting)
        for name in self.task.strategies:
            self._emit({"event": "begin", "name": name})
            self._emit(self._one(name))

    def _one(self, name: str) -> dict[str, Any]:
        """Ask, measure and abort one strategy."""
        chosen = strategy(name)
        facts = {"name": name, "says": chosen.says, "library": chosen.library}
        # in a process of its own: what is asked may start what no fork survives
        asked = self._run_in_child(f"{name}-ask", partial(self.fresh.ask, name))
        reason, remark = asked.value or (asked.failure, None)
        if reason:
            return {"event": "left-out", **facts, "reason": reason}
        ended = self.child(name, partial(self.fresh.measure, name), measure=True)
        if ended.failure:
            return {"event": "failed", **facts, "reason": ended.failure}
        left = None
        if self.task.abort:
            self._emit_progress(name, "aborting")
            left = abort(self, name, ended.value["names"])
        return {"event": "measured", **facts, "remark": remark, **ended.value, "abort": left}

    def child(
        self, job: str, work: Callable[[Device, Tell], Any], *, measure: bool = False
    ) -> Ended:
        """Work in a fresh process of every rank; where one fails, all fail with its reason."""
        folder = self.make_folder(job)
        ended = self._run_in_child(job, self.fresh.grouped(job, work), measure=measure)
        if measure and not ended.failure:
            memory = self.meeting.gather([ended.memory.base, ended.memory.peak])
            base, peak = (max(values) for values in zip(*memory, strict=True))
            ended.value |= {"host_base": base, "host_peak": peak}
        self.clean(folder)
        return ended

    def _run_in_child(self, job: str, work: Work, *, measure: bool = False) -> Ended:
        child = Child(work, self.task.log(job, self.meeting.rank), self.task.timeout)
        on_event = partial(self._emit_progress, job)
        ended = child.watch(self.meeting.failing(job), on_event, measure=measure)
        if ended.failure:
            self.meeting.fail(job)
        else:
            child.join()
        reasons = self.meeting.gather(ended.failure)
        failures = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
        causes = [cause for cause in failures if not _is_consequence(cause[1])] or failures
        ended.failure = f"rank {causes[0][0]}: {causes[0][1]}" if causes else None
        return ended

    def _emit_progress(self, job: str, word: str, value: Any = None) -> None:
        self._emit({"event": "doing", "name": job, "what": word, "number": value})

    def make_folder(self, job: str) -> Path:
        """The job's folder, there for every rank."""
        folder = self.task.folder(job)
        if self.meeting.rank == 0:
            folder.mkdir(parents=True)
        self.meeting.gather(None)
        return folder

    def clean(self, folder: Path) -> None:
        """End what still runs below every rank, then remove the folder."""
        end_orphans()
        self.meeting.gather(None)
        if self.meeting.rank == 0:
            remove(folder)


def _is_consequence(reason: str) -> bool:
    """Whether a rank failed because another one did: it was ended, or its connection was."""
    return reason.endswith(" failed") or " by peer" in reason


def accelerators_here() -> Accelerators:
    """The accelerators here, asked in a process of its own: what asks can fork no more.

    Unsupported where torch cannot tell.
    """
    with warnings.catch_warnings(action="ignore"):
        import torch  # noqa: F401 (here, for the rest of the run needs it as well)
    with tempfile.NamedTemporaryFile() as log:
        child = Child(lambda tell: Accelerators.here(), Path(log.name))
        ended = child.watch(lambda: None, lambda word, value: None)
        child.join()
    if not isinstance(ended.value, Accelerators):
        raise Unsupported(
            f"torch cannot tell which accelerators are here: {ended.failure}",
            hint="CUDA_VISIBLE_DEVICES= measures on CPU ranks",
        )
    return ended.value


def run_started_rank(task: str, events: str) -> None:
    """Do the task of a file as a rank that the elastic agent started; events go to a file."""
    die_with_parent()
    with open(events, "a", encoding="utf-8", buffering=1) as stream:
        told = Task.read(Path(task))
        run_rank(told, Meeting(), partial(_write_line, stream))


def _write_line(stream: TextIO, event: dict[str, Any]) -> None:
    stream.write(json.dumps(event) + "\n")
