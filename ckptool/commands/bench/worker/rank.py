"""One rank of the benchmark: it watches the fresh processes that train and save."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptool.commands.bench.launch import Emit, Task
from ckptool.commands.bench.machine import measure_limits
from ckptool.commands.bench.meeting import Meeting
from ckptool.commands.bench.processes import (
    ChildResult,
    Tell,
    Work,
    adopt_orphans,
    end_descendants,
    run_child,
)
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.scratch import join_scratch
from ckptool.commands.bench.shared_memory import SharedMemory, free_shared_memory
from ckptool.commands.bench.specs import total
from ckptool.commands.bench.strategies import load_strategy
from ckptool.commands.bench.strategies.base import Environment, Strategy
from ckptool.commands.bench.strategies.experimental import import_experimental
from ckptool.commands.bench.worker.abort import abort
from ckptool.commands.bench.worker.device import Device
from ckptool.commands.bench.worker.loop import measure
from ckptool.commands.bench.worker.pulse import BESIDE, DONE, Pulse
from ckptool.commands.bench.worker.training import Training
from ckptool.storage.files import count_cores

_OPEN_FILES = 1 << 16

Job = Callable[[Device, Tell], Any]
"""What a fresh process of every rank does, within a process group of those processes.

It is the first to connect to a store, which survives no fork.
"""


def run_rank(task: Task, meeting: Meeting, emit: Emit) -> None:
    """Do the task as this rank. ``emit`` takes the events, of rank 0 alone."""
    adopt_orphans()
    _allow_open_files()
    shared = SharedMemory()
    try:
        with join_scratch(task.folders, meeting) as folders:
            Rank(replace(task, folders=folders), meeting, emit, shared).run()
    finally:
        end_descendants(shared.look)
        shared.remove_left()


def _allow_open_files() -> None:
    """Allow as many as the system lets: every tensor shared with a process is an open file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def import_torch() -> None:
    """Import all that is heavy, so that no fork does; none of it starts a device's runtime."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    with suppress(ImportError):  # its strategies say why they cannot run
        import_experimental()


class Rank:
    """The watching process of a rank, in step with those of the other ranks."""

    def __init__(self, task: Task, meeting: Meeting, emit: Emit, shared: SharedMemory) -> None:
        self.task = task
        self.meeting = meeting
        self.shared = shared
        self._emit: Emit = emit if meeting.rank == 0 else lambda event: None

    def run(self) -> None:
        """Measure the limits, then every strategy that can run here."""
        self._emit_progress("limits", "limits")
        share = total(self.task.specs) // self.meeting.size

        def work(device: Device, tell: Tell) -> dict[str, float | None]:
            return measure_limits(share, device, self.task.saves("limits"))

        limits = self.run_job("limits", work)
        self._emit({"event": "limits", "limits": limits.value, "failure": limits.failure})
        if limits.value:
            self.task.write_rate = limits.value["write"] or limits.value["upload"]
        for name in self.task.strategies:
            self._emit({"event": "begin", "name": name})
            self._emit(self._run_strategy(name, load_strategy(name)))

    def _run_strategy(self, name: str, strategy: Strategy) -> dict[str, Any]:
        """Ask, measure and abort one strategy; return its event."""
        facts = {"name": name, "says": strategy.says, "library": strategy.library}
        # in a process of its own: what is asked may start what no fork survives
        answer = self._run_in_child(f"{name}-ask", lambda tell: self._ask(strategy))
        reason, remark = answer.value or (answer.failure, None)
        if reason:
            return {"event": "skipped", **facts, "reason": reason}

        def work(device: Device, tell: Tell) -> dict[str, Any]:
            training = Training.begin(self.task.specs, device)
            return measure(
                strategy, training, self.task.saves(name), self.task.settings.repeat + 1, tell
            )

        result = self.run_job(name, work, measure=True)
        if result.failure:
            return {"event": "failed", **facts, "reason": result.failure}
        aborted = None
        if self.task.settings.abort:
            self._emit_progress(name, "aborting")
            aborted = abort(self, name, strategy, result.value["names"])
        return {"event": "measured", **facts, "remark": remark, **result.value, "abort": aborted}

    def _ask(self, strategy: Strategy) -> list[str | None]:
        """Say why a strategy cannot run here, and what differs here; it may load libraries."""
        if self.task.folders.store and not getattr(strategy, "to_urls", False):
            return ["saves to disks only", None]
        device, nbytes = Device(self.task.settings.device, 0), total(self.task.specs)
        folder = self.task.folders.scratch
        environment = Environment(device, self.meeting.size, nbytes, free_shared_memory(), folder)
        reason = strategy.unavailable(environment)
        return [reason, None if reason else strategy.remark(environment)]

    def run_job(self, job: str, work: Job, *, measure: bool = False) -> ChildResult:
        """Work in a fresh process of every rank; where one fails, all fail with its reason."""
        folder = self.make_folder(job)
        result = self._run_in_child(job, self.in_group(job, work), measure=measure)
        if measure and not result.failure:
            memory = zip(*self.meeting.gather([result.base, result.peak]), strict=True)
            result.value |= dict(zip(("host_base", "host_peak"), map(max, memory), strict=True))
        self.clean(folder)
        return result

    def in_group(self, job: str, work: Job) -> Work:
        """Return the work within a process group that all ranks' processes of this job form."""

        def run(tell: Tell) -> Any:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(max(1, count_cores() // self.meeting.size))
            device = Device.of_rank(self.task.settings.device)
            self.meeting.begin_group(job, device.backend, self.task.timeout)
            try:
                return work(device, tell)
            finally:
                dist.destroy_process_group()

        return run

    def _run_in_child(self, job: str, work: Work, *, measure: bool = False) -> ChildResult:
        pulse = self.pulse(job)
        failing = self.meeting.failing(job)

        def hear(word: str, value: Any) -> None:
            pulse.hear(word, value)
            if word not in (BESIDE, DONE):
                self._emit_progress(job, word, value)

        result = run_child(
            work,
            self.task.log(job, self.meeting.rank),
            timeout=self.task.timeout,
            stop=lambda: failing() or pulse.problem(),
            on_event=hear,
            look=self.shared.look,
            measure=measure,
        )
        if result.failure:
            self.meeting.fail(job)
        reasons = self.meeting.gather(result.failure)
        failures = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
        causes = [cause for cause in failures if not _is_consequence(cause[1])] or failures
        result.failure = f"rank {causes[0][0]}: {causes[0][1]}" if causes else None
        return result

    def pulse(self, job: str) -> Pulse:
        """Return what tells whether a job goes on."""
        return Pulse(self.task.saves(job).disk, self.meeting.counter(job))

    def _emit_progress(self, job: str, word: str, value: Any = None) -> None:
        self._emit({"event": "doing", "name": job, "what": word, "number": value})

    def make_folder(self, job: str) -> Path:
        """Make the job's folder; it is there for every rank on return."""
        folder = self.task.folder(job)
        if self.meeting.rank == 0:
            folder.mkdir(parents=True)
        self.meeting.gather(None)
        return folder

    def clean(self, folder: Path) -> None:
        """End what still runs below every rank, then remove the folder and what they held."""
        end_descendants(self.shared.look)
        self.meeting.gather(None)
        self.shared.remove_left()
        if self.meeting.rank == 0:
            DiskFolder(folder).remove()


def _is_consequence(reason: str) -> bool:
    """Whether a rank failed because another one did: it was ended, or its connection was."""
    return reason.endswith(" failed") or " by peer" in reason
