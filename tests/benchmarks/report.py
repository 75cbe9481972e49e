"""What was measured of commands: samples, medians, and ratios to their peers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct

from benchmarks.rows import Row
from benchmarks.samples import Sample
from ckptool.commands.document import Report, document


class Ratio(Struct, frozen=True):
    """A row's median over its peer's, and the lowest and highest of the single rounds."""

    peer: str
    value: float
    lowest: float
    highest: float


class RowResult(Struct, frozen=True):
    """A row's samples: one per round, or a single one.

    ``imports_torch`` is None if it was not looked at. ``nbytes`` is the size of the checkpoint
    that the row's command moves, 0 if it moves none.
    """

    row: Row
    samples: tuple[Sample, ...]
    imports_torch: bool | None = None
    nbytes: int = 0

    @property
    def values(self) -> tuple[float, ...]:
        """The seconds that count for this row."""
        return tuple(getattr(sample, self.row.measure) for sample in self.samples)

    @property
    def median(self) -> float:
        """Median of the seconds that count."""
        return statistics.median(self.values)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all samples."""
        return max(sample.peak_bytes for sample in self.samples)

    @property
    def read_bytes(self) -> int:
        """The most that a load read from files, or a command from a store; 0 for others."""
        return max(sample.read_bytes for sample in self.samples)

    @property
    def written_bytes(self) -> int:
        """The most that a command sent to a store; 0 for others."""
        return max(sample.written_bytes for sample in self.samples)

    @property
    def requests(self) -> int:
        """The most requests of a store; 0 for commands on files."""
        return max(sample.requests for sample in self.samples)

    @property
    def cpu(self) -> float:
        """Median of the processor's seconds."""
        return statistics.median(sample.cpu for sample in self.samples)

    def against(self, peer: RowResult) -> Ratio:
        """Return this row as a multiple of another, which may have been measured but once."""
        rounds = [own / theirs for own, theirs in zip(self.values, peer.values, strict=False)]
        return Ratio(peer.row.name, self.median / peer.median, min(rounds), max(rounds))


class TransferBenchReport(Report, frozen=True):
    """All that was measured, on what, and what was left out with the reason."""

    source: str
    conditions: str
    nbytes: int
    files: int
    light_tensors: int
    repeat: int
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    results: tuple[RowResult, ...]
    skipped: Mapping[str, str]

    schema: ClassVar = "transfer-bench"

    def to_dict(self) -> dict[str, Any]:
        """Return the report with every sample."""
        settings = ("source", "conditions", "nbytes", "files", "light_tensors", "repeat")
        return document(
            self.schema,
            machine=self.machine,
            versions=self.versions,
            settings={name: getattr(self, name) for name in settings},
            rows=[_row_json(self, result) for result in self.results],
            skipped=self.skipped,
        )

    def ratios(self, result: RowResult) -> tuple[Ratio, ...]:
        """Return the row against each of its peers that was measured."""
        peers = {peer.row.name: peer for peer in self.results}
        return tuple(result.against(peers[name]) for name in result.row.peers if name in peers)


def _row_json(report: TransferBenchReport, result: RowResult) -> dict[str, Any]:
    return {
        "name": result.row.name,
        "command": result.row.command,
        "measure": result.row.measure,
        "nbytes": result.nbytes,
        "median": result.median,
        "peak_bytes": result.peak_bytes,
        "read_bytes": result.read_bytes,
        "written_bytes": result.written_bytes,
        "requests": result.requests,
        "ratios": report.ratios(result),
        "imports_torch": result.imports_torch,
        "samples": result.samples,
    }
