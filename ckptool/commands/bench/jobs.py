"""The jobs that a fresh process of every rank does, within a process group of those processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.commands.bench.files import shared_free
from ckptool.commands.bench.fork_server import Tell, Work
from ckptool.commands.bench.limits import limits
from ckptool.commands.bench.specs import Task, total
from ckptool.commands.bench.store import Meeting
from ckptool.commands.bench.strategies import strategy
from ckptool.commands.bench.strategies.base import Place
from ckptool.commands.bench.worker.consistency import differing, snapshot
from ckptool.commands.bench.worker.device import Device
from ckptool.commands.bench.worker.loop import measure
from ckptool.commands.bench.worker.training import Training


@dataclass(frozen=True, slots=True)
class Fresh:
    """The jobs of one rank."""

    task: Task
    meeting: Meeting

    def grouped(self, job: str, work: Callable[[Device, Tell], Any]) -> Work:
        """The work within a process group that all ranks' processes of this job form."""
        return partial(self._grouped, job, work)

    def _grouped(self, job: str, work: Callable[[Device, Tell], Any], tell: Tell) -> Any:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.meeting.size))
        device = Device.of_rank(self.task.device_type)
        self.meeting.begin_group(job, device.backend, self.task.timeout)
        try:
            return work(device, tell)
        finally:
            dist.destroy_process_group()

    def ask(self, name: str, tell: Tell) -> list[str | None]:
        """Why a strategy cannot run here, and what is different here; it may load libraries."""
        device = Device(self.task.device_type, 0)
        nbytes, folder = total(self.task.specs), Path(self.task.scratch)
        place = Place(device, self.meeting.size, nbytes, shared_free(), folder)
        chosen = strategy(name)
        if self.task.store and not getattr(chosen, "to_urls", False):
            return ["saves to disks only", None]
        reason = chosen.unavailable(place)
        return [reason, None if reason else chosen.remark(place)]

    def limits(self, device: Device, tell: Tell) -> dict[str, float | None]:
        """What the hardware can do with this rank's share."""
        share = total(self.task.specs) // self.meeting.size
        return limits(share, device, self.task.place("limits"))

    def measure(self, name: str, device: Device, tell: Tell) -> dict[str, Any]:
        """The whole measurement of a strategy."""
        training = Training.begin(self.task.specs, device)
        return measure(strategy(name), training, self.task.place(name), self.task.saves, tell)

    def save_once(self, name: str, path: Path, device: Device, tell: Tell) -> None:
        """Save, and train on until it is over, for as long as nobody kills it."""
        training, chosen = Training.begin(self.task.specs, device), strategy(name)
        chosen.set_up(device)
        tell("saving", None)
        handle = chosen.save(training.state, path)
        while not training.step(handle.done())[1]:
            pass
        handle.commit()
        tell("over", None)
        chosen.finish()

    def load(self, name: str, path: Path, device: Device, tell: Tell) -> bool:
        """Whether the library loads what is there, bit for bit as ``save_once`` had it."""
        training, chosen = Training.begin(self.task.specs, device), strategy(name)
        chosen.set_up(device)
        try:
            loaded = chosen.load(training.empty_state(), path)
            return not differing(snapshot(training.state), loaded)
        finally:
            chosen.finish()
