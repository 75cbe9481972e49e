"""The benchmark of save strategies as ``ckptool.bench/1``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ckptool.commands.bench.compare import Change
from ckptool.commands.bench.report import SCHEMA, BenchReport, Measured, steady
from ckptool.render.bench_words import advice


def bench_json(report: BenchReport, changes: Sequence[Change] | None = None) -> dict[str, Any]:
    """Everything with every sample. Times are seconds, sizes bytes, rates bytes a second."""
    best = report.best
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": dict(report.machine),
        "versions": dict(report.versions),
        "settings": asdict(report.settings),
        "limits": dict(report.limits),
        "strategies": [_strategy(report, result) for result in report.ranked],
        "left_out": dict(report.left_out),
        "failed": dict(report.failed),
        "best": best.name if best else None,
        "advice": advice(report),
    }
    if changes is not None:
        told["compared"] = [asdict(change) for change in changes]
    return told


def _strategy(report: BenchReport, result: Measured) -> dict[str, Any]:
    nbytes = report.settings.nbytes
    return {
        "name": result.name,
        "library": result.library,
        "blocked": _times(result.blocked, nbytes, report.blocked_fraction(result)),
        "written": _times(result.written, nbytes, None),
        "durable": _times(result.durable, nbytes, report.durable_fraction(result)),
        "steps": {
            "before": list(result.before),
            "during": [list(steps) for steps in result.during],
            "after": list(result.after),
            "slowdown": result.slowdown,
        },
        "host_memory": {
            "base": result.host_base,
            "peak": result.host_peak,
            "extra": result.host_extra,
        },
        "device_memory": result.device_peak,
        "disk": {"bytes": result.nbytes, "files": result.files},
        "consistency": asdict(result.consistency),
        "abort": asdict(result.abort) if result.abort else None,
        "remark": result.remark,
    }


def _times(samples: Sequence[float], nbytes: int, fraction: float | None) -> dict[str, Any]:
    """``median``, ``lowest`` and ``highest`` are of the steady saves, without the first."""
    later = steady(samples)
    median = statistics.median(later)
    return {
        "first": samples[0],
        "median": median,
        "lowest": min(later),
        "highest": max(later),
        "bytes_per_second": nbytes / median,
        "of_limit": fraction,
        "samples": list(samples),
    }
