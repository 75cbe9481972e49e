"""``ckptool bench``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.parameters import AsJson, Debug, Quiet
from ckptool.commands.options.bench import BenchOptions
from ckptool.core.options import changed
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport, Change
    from ckptool.commands.bench.transfer.report import TransferBenchReport

_TRANSFER_SIZE = 2_000_000_000
_STORES_SIZE = 256_000_000

_OF_TRANSFERS = {"--size", "--repeat", "--out"}

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


def bench(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SRC]", help="With --transfer, the checkpoint to measure with."),
    ] = None,
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
        typer.Option("--recommend", help="Print only which strategy to take and why, in a line."),
    ] = False,
    transfer: Annotated[
        bool,
        typer.Option("--transfer", help="Measure ckptool's own commands against cp and torch's."),
    ] = False,
    stores: Annotated[
        bool,
        typer.Option(
            "--stores", help="Measure ckptool's own commands on a store against plain downloads."
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure ways to save on this machine: how long each blocks training, and until it is durable.

    Every strategy saves within a step loop on its own ranks, or on torchrun's. What it costs the
    steps, memory and disk is measured beside what the hardware can do; then parameters are changed
    during a save, and what was saved is loaded back and compared.
    """
    _require_paths(source=source, plot=plot, compare=compare)
    if transfer or stores:
        _require_paths(out=options.out)
        others = plot or compare or recommend or {*changed(options)} - _OF_TRANSFERS
        if (transfer and stores) or others:
            raise UsageError(
                f"--{'transfer' if transfer else 'stores'} can only be combined with --size,"
                " --repeat, --out and --json"
            )
    if transfer:
        _transfer(source, options, as_json=as_json)
        return
    if source is not None:
        raise UsageError(
            f"{source}: unexpected argument without --transfer", hint=f"--like {source}"
        )
    if stores:
        _stores(options, as_json=as_json)
        return
    if options.like is not None and options.size is not None:
        raise UsageError("--like and --size cannot be combined")
    report, changes = _measured(options, plot, compare, tolerance, quiet=quiet)
    if report is not None:
        _show(report, changes, plot, as_json=as_json, recommend=recommend)


def _require_paths(**places: object) -> None:
    """Raise UsageError for a URL."""
    for name, place in places.items():
        if _URL.match(str(place)):
            option = "--transfer" if name == "source" else f"--{name}"
            raise UsageError(
                f"{option} takes a path, not a URL",
                hint="without --transfer, --like and --out take URLs",
            )


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
    *,
    as_json: bool,
    recommend: bool,
) -> None:
    """Show the report; exit 1 if something is slower than --tolerance allows."""
    from ckptool.commands.document import plain
    from ckptool.render.bench.bars import write_plot
    from ckptool.render.bench.report import show_bench, show_recommended
    from ckptool.render.messages import print_json

    if plot is not None:
        write_plot(report, plot)
    if as_json:
        print_json(report.to_dict() | ({} if changes is None else {"compared": plain(changes)}))
    elif recommend:
        show_recommended(report)
    else:
        show_bench(report, changes)
    if any(change.regressed for change in changes or ()):
        raise typer.Exit(1)


def _transfer(source: Path | None, options: BenchOptions, *, as_json: bool) -> None:
    from ckptool.commands.bench.transfer.run import transfer_bench
    from ckptool.render.messages import show_step

    size, out = options.size or _TRANSFER_SIZE, Path(str(options.out))
    report = transfer_bench(source, size, out, options.repeat, progress=show_step)
    _show_transfers(report, as_json=as_json)


def _stores(options: BenchOptions, *, as_json: bool) -> None:
    from ckptool.commands.bench.transfer.stores import store_bench
    from ckptool.render.messages import show_step

    size, out = options.size or _STORES_SIZE, Path(str(options.out))
    report = store_bench(size, out, options.repeat, progress=show_step)
    _show_transfers(report, as_json=as_json)


def _show_transfers(report: TransferBenchReport, *, as_json: bool) -> None:
    from ckptool.render.bench.transfer import show_transfer_bench
    from ckptool.render.messages import print_json

    if as_json:
        print_json(report.to_dict())
    else:
        show_transfer_bench(report)
