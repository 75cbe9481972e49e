"""What the ranks are told to do, as the command writes it and they read it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ckptool.commands.bench.specs import TensorSpec, total
from ckptool.engine.remote_path import Location, location

_PATIENCE = 240.0
_SLOWEST = 10e6
"""Bytes a second that are written at least, as long as nobody has measured it."""

_SLACK = 20
"""How many times as long as a raw write a save may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the ranks are to do. ``scratch`` is theirs alone; ``temporary`` is their TMPDIR.

    ``store``: the URL that checkpoints are saved below; None to save them in ``scratch``.
    ``write_rate``: bytes a second that all ranks write together, where that is known.
    """

    specs: list[TensorSpec]
    strategies: list[str]
    saves: int
    abort: bool
    device_type: str
    scratch: str
    temporary: str
    store: str | None = None
    write_rate: float = _SLOWEST * _SLACK

    @staticmethod
    def read(path: Path) -> Task:
        """The task that ``write`` wrote."""
        told = json.loads(path.read_text("utf-8"))
        specs = [
            TensorSpec(tuple(spec["path"]), tuple(spec["shape"]), spec["dtype"])
            for spec in told["specs"]
        ]
        return Task(**{**told, "specs": specs})

    def write(self, path: Path) -> None:
        """For a process that is started with its path."""
        path.write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    @property
    def patience(self) -> float:
        """Seconds that a save, or a talk of the ranks, may take before it is held for hung."""
        return _PATIENCE + _SLACK * total(self.specs) / self.write_rate

    def folder(self, job: str) -> Path:
        """Where a job of the ranks may write."""
        return Path(self.scratch) / job.replace("/", "_")

    def place(self, job: str) -> Location:
        """Where a job of the ranks saves."""
        if self.store is None:
            return self.folder(job)
        return location(self.store) / job.replace("/", "_")

    def log(self, job: str, rank: int) -> Path:
        """Where the words of a job's processes go."""
        return Path(self.scratch) / "logs" / f"{job.replace('/', '_')}-{rank}.log"
