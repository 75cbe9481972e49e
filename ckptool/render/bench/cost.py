"""The cost of each strategy in training time, and the best one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from ckptool.commands.bench.words import seconds, share
from ckptool.core.text import duration
from ckptool.render.text import visible

if TYPE_CHECKING:
    from ckptool.commands.bench.cost import Cost
    from ckptool.commands.bench.report import BenchReport

_HEADINGS = "  strategy|a save costs|steps|every|of training time|a week|best interval"


def cost_rows(report: BenchReport) -> list[list[Text]]:
    """Return a row per strategy, the cheapest first; none if nothing is known of the job."""
    if not report.training.is_known:
        return []
    rows = [[Text(heading, "dim") for heading in _HEADINGS.split("|")]]
    for result in sorted(report.results, key=report.loss_of):
        best = result is report.best
        style = "bold green" if best else "" if result.is_consistent else "dim"
        cells = (f"{'▸' if best else ' '} {visible(result.name)}", *_cells(report.cost(result)))
        rows.append([Text(cell, style) for cell in cells])
    return rows


def _cells(cost: Cost) -> tuple[str, ...]:
    return (
        seconds(cost.save),
        "" if cost.steps is None else f"{cost.steps:.3g}",
        "" if cost.interval is None else duration(cost.interval),
        "" if cost.lost is None else share(cost.lost),
        "" if cost.hours_a_week is None else f"{cost.hours_a_week:.2g} h",
        "" if cost.daly is None else duration(cost.daly),
    )
