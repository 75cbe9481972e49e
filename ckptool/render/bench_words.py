"""What a benchmark comes to, in words."""

from __future__ import annotations

from ckptool.commands.bench.report import BenchReport, Measured
from ckptool.render.text import size

_SYNCHRONOUS = ("dcp-sync", "torch-save", "experimental-sync")


def seconds(value: float) -> str:
    """``0.21 s``, ``34 ms``: two or three significant digits."""
    if value < 0.0995:
        return f"{value * 1000:.2g} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 99.5 else f"{value:,.0f} s"


def rate(value: float) -> str:
    """``1.2 GiB/s``."""
    return f"{size(int(value))}/s"


def advice(report: BenchReport) -> str:
    """One sentence: the best strategy, against the synchronous one that people would use."""
    best = report.best
    if best is None:
        return "no strategy saved what the parameters were when it was called"
    against = _synchronous(report, best)
    than = f" against {seconds(against.blocked_median)} for {against.says}" if against else ""
    durable = f"; until durable {seconds(best.durable_median)}"
    return f"{best.says} blocks {seconds(best.blocked_median)} a save{than}{durable}{_steps(best)}"


def _synchronous(report: BenchReport, best: Measured) -> Measured | None:
    there = {result.name: result for result in report.results if result.name != best.name}
    return next((there[name] for name in _SYNCHRONOUS if name in there), None)


def _steps(best: Measured) -> str:
    if best.slowdown is None:
        return ""
    return f"; steps {slowdown(best.slowdown)} meanwhile"


def slowdown(value: float) -> str:
    """``6 % slower``, ``2 % faster``, ``as fast``."""
    percent = round(abs(value) * 100)
    if not percent:
        return "as fast"
    return f"{percent:,} % {'slower' if value > 0 else 'faster'}"
