"""What the benchmark does now, on stderr.

What a benchmark comes to, in words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptool.commands.bench.report import BenchReport, Measured
from ckptool.render.messages import show_step
from ckptool.render.text import size

Hear = Callable[[Mapping[str, Any]], None]

_DOING = {
    "limits": "what the hardware can do",
    "training": "training",
    "save": "saving",
    "checking": "changing parameters during a save, and loading it back",
    "aborting": "killing it in mid-save",
}


@contextmanager
def bench_progress(names: int, saves: int, *, quiet: bool) -> Iterator[Hear]:
    """Yields what hears the events of a run: a live bar where a person watches, else lines."""
    if quiet:
        yield lambda event: None
        return
    if not sys.stderr.isatty():
        yield _say
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from ckptool.render.text import console

    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(24), TimeElapsedColumn())
    words = TextColumn("{task.description}", markup=False)
    with Progress(*columns, words, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the ranks", total=names)

        def show(event: Mapping[str, Any]) -> None:
            kind = event["event"]
            if kind in ("measured", "left-out", "failed"):
                bar.advance(task)
            elif kind in ("begin", "doing"):
                bar.update(task, description=_words(event, saves))

        yield show


def _words(event: Mapping[str, Any], saves: int) -> str:
    what = _DOING.get(event.get("what", ""), "")
    if event.get("what") == "save":
        what += f" {event['number'] + 1} of {saves}"
    return f"{event['name']}  {what}".rstrip()


def _say(event: Mapping[str, Any]) -> None:
    if event["event"] == "begin":
        show_step(f"measuring {event['name']}")


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
