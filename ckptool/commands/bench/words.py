"""The results of a benchmark in words: seconds, shares, and the best way to save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.core.text import duration

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport


def seconds(value: float) -> str:
    """Return ``0.21 s``, ``34 ms``: two or three significant digits."""
    if value < 0.0995:
        return f"{value * 1000:.2g} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 99.5 else f"{value:,.0f} s"


def slowdown(value: float) -> str:
    """Return ``6 % slower``, ``2 % faster``, ``as fast``."""
    percent = round(abs(value) * 100)
    if not percent:
        return "as fast"
    return f"{percent:,} % {'slower' if value > 0 else 'faster'}"


def share(value: float) -> str:
    """Return ``0.034 %``, ``3.4 %``: two digits."""
    percent = value * 100
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.2g} %"


def cost_words(report: BenchReport) -> str:
    """Return the cost of the best strategy, and of the next one; empty if nothing is known."""
    best = report.best
    if best is None or not report.training.is_known:
        return ""
    cost = report.cost(best)
    if cost.lost is None or cost.interval is None or cost.hours_a_week is None:
        return f" costs {seconds(cost.save)} of training per save" + (
            f", {cost.steps:.3g} steps" if cost.steps is not None else ""
        )
    chosen = " (Daly's best interval)" if report.training.interval is None else ""
    words = f" costs {share(cost.lost)} of training time, {cost.hours_a_week:.2g} h a week,"
    words += f" with a save every {duration(cost.interval)}{chosen}"
    rest = [r for r in report.results if r.is_consistent and r is not best]
    if rest:
        second = min(rest, key=report.loss_of)
        loss = report.cost(second).lost
        words += "" if loss is None else f"; {second.name} would cost {share(loss)}"
    return words


_SYNCHRONOUS = ("dcp-sync", "torch-save", "experimental-sync")


def advice(report: BenchReport) -> str:
    """Return one sentence on the best strategy, against the usual synchronous one."""
    best = report.best
    if best is None:
        return "no strategy saved the parameters as they were at the call"
    rest = {result.name: result for result in report.results if result is not best}
    peer = next((rest[name] for name in _SYNCHRONOUS if name in rest), None)
    than = f" against {seconds(peer.blocked_median)} for {peer.says}" if peer else ""
    durable = f"; until durable {seconds(best.durable_median)}"
    steps = "" if best.slowdown is None else f"; steps {slowdown(best.slowdown)} meanwhile"
    late = overlap_words(report)
    if costs := cost_words(report):
        return f"{best.name} ({best.says}){costs}{late}"
    return f"{best.says} blocks {seconds(best.blocked_median)} per save{than}{durable}{steps}{late}"


def overlap_words(report: BenchReport) -> str:
    """Return what blocks less than the best strategy if training waits later; or nothing."""
    late = {
        result.name: result.overlapped_median
        for result in report.results
        if result.is_consistent and result.overlapped_median is not None
    }
    name = min(late, key=late.__getitem__, default=None)
    if name is None or report.best is None or late[name] >= report.best.blocked_median:
        return ""
    blocks = f"; {name} blocks {seconds(late[name])}"
    return f"{blocks} if training waits for its staging only before the next optimizer step"
