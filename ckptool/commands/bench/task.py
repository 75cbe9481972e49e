"""What the ranks are told to do, as the command writes it and they read it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ckptool.commands.bench.specs import TensorSpec

_PATIENCE = 300.0
_SLOWEST = 10e6
"""Bytes a second of the slowest disk that is waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the ranks are to do. ``scratch`` is theirs alone; ``temporary`` is their TMPDIR."""

    specs: list[TensorSpec]
    strategies: list[str]
    saves: int
    abort: bool
    device_type: str
    scratch: str
    temporary: str

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
        return _PATIENCE + sum(spec.nbytes for spec in self.specs) / _SLOWEST

    def folder(self, job: str) -> Path:
        """Where a job of the ranks may write."""
        return Path(self.scratch) / job.replace("/", "_")

    def log(self, job: str, rank: int) -> Path:
        """Where the words of a job's processes go."""
        return Path(self.scratch) / "logs" / f"{job.replace('/', '_')}-{rank}.log"
