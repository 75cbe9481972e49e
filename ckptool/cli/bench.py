"""``ckptool bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptool.cli.page import require_page, write_page
from ckptool.commands.options.bench import BenchCommand
from ckptool.commands.options.declaration import changed
from ckptool.commands.options.screen import Screen
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.baseline import Change
    from ckptool.commands.bench.report import BenchReport


def bench(*, options: BenchCommand, screen: Screen) -> None:
    """Measure ways to save on this machine: how long each blocks training, and when it is durable.

    Every strategy saves within a step loop on its own ranks, or on torchrun's. What it costs the
    steps, memory and disk is measured next to what the hardware can do; then parameters are changed
    during a save, and what was saved is loaded back and compared.
    """
    page = require_page(options.html)
    report, changes = _measure(options, quiet=screen.quiet)
    if report is not None:
        _show(report, changes, options, screen, page)


def _measure(
    options: BenchCommand, *, quiet: bool
) -> tuple[BenchReport | None, list[Change] | None]:
    """Return the report and the changes since an earlier run; wrong options fail before the run."""
    from ckptool.commands.bench.baseline import Baseline
    from ckptool.commands.bench.run import prepare_bench
    from ckptool.render.bench.bars import require_plottable
    from ckptool.render.bench.report import bench_progress

    baseline = Baseline.read(options.compare) if options.compare else None
    if baseline is None and "--tolerance" in changed(options):
        raise UsageError(
            "--tolerance is what --compare allows: it needs --compare OLD.json",
            hint="`ckptool bench --json > OLD.json` writes one",
        )
    if options.plot is not None:
        require_plottable(options.plot)
    prepared = prepare_bench(options.bench)
    if baseline is not None:
        baseline.require_comparable(prepared.settings, prepared.names)
    with bench_progress(prepared, quiet=quiet) as on_event:
        report = prepared.run(on_event)
    if report is None or baseline is None:
        return report, None
    return report, baseline.changes(report, options.tolerance)


def _show(
    report: BenchReport,
    changes: list[Change] | None,
    options: BenchCommand,
    screen: Screen,
    page: Path | None,
) -> None:
    """Show the report; exit 1 if something is slower than --tolerance allows."""
    from ckptool.commands.document import plain
    from ckptool.render.bench.bars import write_plot
    from ckptool.render.bench.report import show_bench, show_recommended
    from ckptool.render.data import print_json

    if options.plot is not None:
        write_plot(report, options.plot)
    content = report.to_dict() | ({} if changes is None else {"compared": plain(changes)})
    write_page(page, lambda: content, quiet=screen.quiet)
    if screen.as_json:
        print_json(content)
    elif options.recommend:
        show_recommended(report)
    else:
        show_bench(report, changes)
    if any(change.regressed for change in changes or ()):
        raise typer.Exit(1)
