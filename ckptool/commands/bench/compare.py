"""A benchmark against an earlier one: what has become slower than a tolerance allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool.commands.bench.report import SCHEMA, BenchReport, Settings
from ckptool.errors import CannotDo, NotFound, UsageError

_SAME = ("nbytes", "ranks", "device")
_VALUES = ("blocked", "durable")


@dataclass(frozen=True, slots=True)
class Change:
    """A strategy's value in both runs. ``value``: ``blocked`` or ``durable`` (median seconds of the
    steady saves), or ``check`` where it is no longer consistent, or no longer runs."""

    name: str
    value: str
    old: float | None
    new: float | None
    regressed: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """An earlier run: the medians of its strategies by name, and which of them were consistent."""

    path: str
    settings: Mapping[str, Any]
    medians: Mapping[str, Mapping[str, float]]
    consistent: frozenset[str]

    @staticmethod
    def read(path: Path) -> Baseline:
        """What ``ckptool bench --json`` printed; NotFound or UsageError where that is not there."""
        try:
            told = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise NotFound(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
        except ValueError:
            raise UsageError(f"--compare {path}: no JSON") from None
        try:
            if told["schema"] != SCHEMA:
                raise UsageError(f"--compare {path}: {told['schema']!r} is not {SCHEMA!r}")
            rows = {row["name"]: row for row in told["strategies"]}
            return Baseline(
                path=str(path),
                settings={key: told["settings"][key] for key in _SAME},
                medians={n: {v: float(r[v]["median"]) for v in _VALUES} for n, r in rows.items()},
                consistent=frozenset(
                    n for n, r in rows.items() if r["consistency"]["verdict"] == "consistent"
                ),
            )
        except (LookupError, TypeError, ValueError):
            raise UsageError(f"--compare {path}: not what `ckptool bench --json` prints") from None

    def require_comparable(self, settings: Settings) -> None:
        """CannotDo where the run to come measures something else."""
        for key in _SAME:
            old, new = self.settings[key], getattr(settings, key)
            if old != new:
                raise CannotDo(
                    f"{self.path} was measured with {key} {old}, this run has {new}",
                    hint="compare runs of the same --size, --ranks and device",
                )

    def changes(self, report: BenchReport, tolerance: float, asked: list[str]) -> list[Change]:
        """Every strategy that ran then and was ``asked`` now, value by value."""
        names = [name for name in self.medians if name in asked]
        return [change for name in names for change in self._of(name, report, tolerance)]

    def _of(self, name: str, report: BenchReport, tolerance: float) -> Iterator[Change]:
        result = next((result for result in report.results if result.name == name), None)
        if result is None:
            reasons = {**report.left_out, **report.failed}
            why = reasons.get(name, "it was not measured")
            yield Change(name, "check", None, None, True, why)
            return
        new = {"blocked": result.blocked_median, "durable": result.durable_median}
        for value, old in self.medians[name].items():
            regressed = new[value] > old * (1 + tolerance)
            yield Change(name, value, old, new[value], regressed)
        if name in self.consistent and not result.is_consistent:
            yield Change(name, "check", None, None, True, result.consistency.verdict)


def parse_tolerance(text: str) -> float:
    """``10%`` or ``0.1`` as 0.1; UsageError where it is neither."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"--tolerance {text!r} is no share", hint="such as 10% or 0.1")
    return value
