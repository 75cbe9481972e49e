"""``ckptool bench``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ckptool.cli.page import Html, require_page, write_page
from ckptool.cli.parameters import AsJson, Debug, Quiet
from ckptool.commands.options.bench import BenchOptions
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport, Change

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


def bench(
    *,
    options: BenchOptions,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the bars as .svg or .png.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="OLD.json", help="Exit 1 if this earlier run was faster."
        ),
    ] = None,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="SHARE", help="Allowed slowdown for --compare.")
    ] = "10%",
    recommend: Annotated[
        bool,
        typer.Option("--recommend", help="Print only the recommended strategy and why."),
    ] = False,
    html: Html = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure ways to save on this machine: how long each blocks training, and until it is durable.

    Every strategy saves within a step loop on its own ranks, or on torchrun's. What it costs the
    steps, memory and disk is measured next to what the hardware can do; then parameters are changed
    during a save, and what was saved is loaded back and compared.
    """
    _require_paths(plot=plot, compare=compare)
    output = _Output(require_page(html), as_json, quiet)
    if options.like is not None and options.size is not None:
        raise UsageError("--like and --size cannot be combined")
    report, changes = _measured(options, plot, compare, tolerance, quiet=quiet)
    if report is not None:
        _show(report, changes, plot, output, recommend=recommend)


class _Output(NamedTuple):
    """Where a report goes besides the screen."""

    page: Path | None
    as_json: bool
    quiet: bool

    def put(self, content: Mapping[str, Any]) -> bool:
        """Write the page, print the JSON; return whether JSON replaced the screen."""
        from ckptool.render.messages import print_json

        write_page(self.page, lambda: content, quiet=self.quiet)
        if self.as_json:
            print_json(content)
        return self.as_json


def _require_paths(**places: Path | None) -> None:
    """Raise UsageError for a URL."""
    for name, place in places.items():
        if _URL.match(str(place)):
            raise UsageError(f"--{name} takes a path, not a URL", hint="--like and --out take URLs")


def _measured(
    options: BenchOptions, plot: Path | None, compare: Path | None, tolerance: str, *, quiet: bool
) -> tuple[BenchReport | None, list[Change] | None]:
    """Return the report and the changes since an earlier run; wrong options fail before the run."""
    from ckptool.commands.bench.report import Baseline, parse_tolerance
    from ckptool.commands.bench.run import prepare_bench
    from ckptool.render.bench.bars import require_plottable
    from ckptool.render.bench.report import bench_progress

    baseline, allowed = Baseline.read(compare) if compare else None, parse_tolerance(tolerance)
    if plot is not None:
        require_plottable(plot)
    prepared = prepare_bench(options)
    if baseline is not None:
        baseline.require_comparable(prepared.settings)
    with bench_progress(len(prepared.names), options.repeat + 1, quiet=quiet) as on_event:
        report = prepared.run(on_event)
    if report is None or baseline is None:
        return report, None
    return report, baseline.changes(report, allowed, prepared.names)


def _show(
    report: BenchReport,
    changes: list[Change] | None,
    plot: Path | None,
    output: _Output,
    *,
    recommend: bool,
) -> None:
    """Show the report; exit 1 if something is slower than --tolerance allows."""
    from ckptool.commands.document import plain
    from ckptool.render.bench.bars import write_plot
    from ckptool.render.bench.report import show_bench, show_recommended

    if plot is not None:
        write_plot(report, plot)
    more = {} if changes is None else {"compared": plain(changes)}
    if not output.put(report.to_dict() | more):
        if recommend:
            show_recommended(report)
        else:
            show_bench(report, changes)
    if any(change.regressed for change in changes or ()):
        raise typer.Exit(1)
