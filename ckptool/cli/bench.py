"""``ckptool bench``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.page import Html, require_page, write_page
from ckptool.cli.parameters import AsJson, Debug, Quiet
from ckptool.commands.options.bench import BenchOptions
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.baseline import Change
    from ckptool.commands.bench.report import BenchReport

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
    for option, file in {"--plot": plot, "--compare": compare}.items():
        if _URL.match(str(file)):
            raise UsageError(f"{option} takes a path, not a URL", hint="--like and --out take URLs")
    page = require_page(html)
    if options.like is not None and options.size is not None:
        raise UsageError("--like and --size cannot be combined")
    report, changes = _measure(options, plot, compare, tolerance, quiet=quiet)
    if report is not None:
        _show(report, changes, plot, page, as_json=as_json, recommend=recommend, quiet=quiet)


def _measure(
    options: BenchOptions, plot: Path | None, compare: Path | None, tolerance: str, *, quiet: bool
) -> tuple[BenchReport | None, list[Change] | None]:
    """Return the report and the changes since an earlier run; wrong options fail before the run."""
    from ckptool.commands.bench.baseline import Baseline, parse_tolerance
    from ckptool.commands.bench.run import prepare_bench
    from ckptool.render.bench.bars import require_plottable
    from ckptool.render.bench.report import bench_progress

    baseline, allowed = Baseline.read(compare) if compare else None, parse_tolerance(tolerance)
    if plot is not None:
        require_plottable(plot)
    prepared = prepare_bench(options)
    if baseline is not None:
        baseline.require_comparable(prepared.settings)
    with bench_progress(prepared, quiet=quiet) as on_event:
        report = prepared.run(on_event)
    if report is None or baseline is None:
        return report, None
    return report, baseline.changes(report, allowed)


def _show(
    report: BenchReport,
    changes: list[Change] | None,
    plot: Path | None = None,
    page: Path | None = None,
    *,
    as_json: bool = False,
    recommend: bool = False,
    quiet: bool = False,
) -> None:
    """Show the report; exit 1 if something is slower than --tolerance allows."""
    from ckptool.commands.document import plain
    from ckptool.render.bench.bars import write_plot
    from ckptool.render.bench.report import show_bench, show_recommended
    from ckptool.render.messages import print_json

    if plot is not None:
        write_plot(report, plot)
    content = report.to_dict() | ({} if changes is None else {"compared": plain(changes)})
    write_page(page, lambda: content, quiet=quiet)
    if as_json:
        print_json(content)
    elif recommend:
        show_recommended(report)
    else:
        show_bench(report, changes)
    if any(change.regressed for change in changes or ()):
        raise typer.Exit(1)
