"""What is slower than in an earlier run of the benchmark, or worse."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptool.commands.bench.report import CONSISTENT, BenchReport, Measured, Settings
from ckptool.errors import NotFound, Unsupported, UsageError

SCHEMA = "ckptool.bench/2"
_SAME = ("nbytes", "ranks", "device")
_VALUES = ("blocked", "durable")


class Change(Struct, frozen=True):
    """A strategy's value in both runs. ``value``: ``blocked`` or ``durable`` (median seconds of the
    steady saves), or ``check`` where it is no longer consistent, or no longer runs."""

    name: str
    value: str
    old: float | None
    new: float | None
    regressed: bool
    why: str = ""


class Baseline(Struct, frozen=True):
    """An earlier run: the medians of its strategies by name, and which of them were consistent."""

    path: str
    settings: Mapping[str, Any]
    medians: Mapping[str, Mapping[str, float]]
    consistent: frozenset[str]

    @staticmethod
    def read(path: Path) -> Baseline:
        """Read what ``ckptool bench --json`` printed; NotFound or UsageError if it is not."""
        try:
            earlier = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise NotFound(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
        except (ValueError, RecursionError):
            raise UsageError(f"--compare {path}: not JSON") from None
        try:
            if earlier["schema"] != SCHEMA:
                raise UsageError(f"--compare {path}: {earlier['schema']!r} is not {SCHEMA!r}")
            rows = {row["name"]: row for row in earlier["strategies"]}
            return Baseline(
                path=str(path),
                settings={key: earlier["settings"][key] for key in _SAME},
                medians={n: {v: float(r[v]["median"]) for v in _VALUES} for n, r in rows.items()},
                consistent=frozenset(
                    n for n, r in rows.items() if r["consistency"]["verdict"] == CONSISTENT
                ),
            )
        except (LookupError, TypeError, ValueError):
            raise UsageError(f"--compare {path}: not what `ckptool bench --json` prints") from None

    def require_comparable(self, settings: Settings, names: Collection[str]) -> None:
        """Raise Unsupported if a run, of strategies of these ``names``, measures something else."""
        for key in _SAME:
            old, new = self.settings[key], getattr(settings, key)
            if old != new:
                raise Unsupported(
                    f"{self.path} was measured with {key} {old}, this run has {new}",
                    hint="compare runs of the same --size, --ranks and device",
                )
        if self.medians.keys().isdisjoint(names):
            raise Unsupported(
                f"{self.path} has none of {', '.join(names)}, but {', '.join(self.medians)}",
                hint="compare runs of the same --strategies",
            )

    def changes(self, report: BenchReport, tolerance: float) -> list[Change]:
        """Return the values of every strategy that ran then and was to run now."""
        results = {result.name: result for result in report.results}
        reasons = {**report.skipped, **report.failed}
        changes: list[Change] = []
        for name in self.medians:
            if name in results:
                changes += self._compare(name, results[name], tolerance)
            elif name in reasons:
                changes.append(Change(name, "check", None, None, True, reasons[name]))
        return changes

    def _compare(self, name: str, result: Measured, tolerance: float) -> Iterator[Change]:
        new = {"blocked": result.blocked_median, "durable": result.durable_median}
        for value, old in self.medians[name].items():
            regressed = new[value] > old * (1 + tolerance)
            yield Change(name, value, old, new[value], regressed)
        if name in self.consistent and not result.is_consistent:
            yield Change(name, "check", None, None, True, result.consistency.verdict)
