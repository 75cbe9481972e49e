"""``ckptool bench``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.options import AsJson, Debug, Quiet
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport, Change
    from ckptool.commands.bench.run import BenchOptions

_TRANSFER_SIZE, _STATE_SIZE = "2GB", "1GiB"

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


def bench(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SRC]", help="With --transfer: what to measure with."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="CKPT",
            help="Save tensors shaped as this checkpoint's; a path or a URL.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help=f"Of the state; {_STATE_SIZE} unless told, with --transfer {_TRANSFER_SIZE}.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="LIST",
            help="Names, families or globs with commas, such as dcp-sync,dcp-async-*; or"
            " MODULE:CLASS for a saver of your own. Default: all.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Default: one an accelerator, or 2 on the CPU."),
    ] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Saves after the first; with --transfer, rounds.")
    ] = 5,
    out: Annotated[
        str,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to save, a folder or a URL; all is removed at the end.",
        ),
    ] = ".",
    abort: Annotated[
        bool,
        typer.Option("--abort", help="Also kill each strategy in mid-save: what is left then?"),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the bars as .svg or .png.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OLD.json", help="Exit 1 where it was faster before."),
    ] = None,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="SHARE", help="How much slower is no regression.")
    ] = "10%",
    transfer: Annotated[
        bool,
        typer.Option("--transfer", help="Measure ckptool's own commands against cp and torch's."),
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
    if transfer:
        _require_paths(out=out)
        if any((like, strategies, ranks, abort, plot, compare)):
            raise UsageError("--transfer goes with --size, --repeat, --out and --json alone")
        _transfer(source, size or _TRANSFER_SIZE, Path(out), repeat, as_json=as_json)
        return
    if source is not None:
        raise UsageError(
            f"{source}: an argument is for --transfer", hint=f"--like {source} takes its shapes"
        )
    if like is not None and size is not None:
        raise UsageError("--like and --size contradict one another")
    from ckptool.commands.bench.run import BenchOptions
    from ckptool.core.units import parse_size
    from ckptool.storage.url import location

    options = BenchOptions(
        size=parse_size(size or _STATE_SIZE, "--size"),
        like=location(like) if like else None,
        out=location(out),
        strategies=tuple(word.strip() for word in (strategies or "").split(",") if word.strip()),
        ranks=ranks,
        repeat=repeat,
        abort=abort,
    )
    report, changes = _measured(options, plot, compare, tolerance, quiet=quiet)
    if report is not None:
        _show(report, changes, plot, as_json=as_json)


def _require_paths(**places: str | Path | None) -> None:
    """UsageError for a URL."""
    for name, place in places.items():
        if _URL.match(str(place)):
            said = "--transfer" if name == "source" else f"--{name}"
            raise UsageError(
                f"{said} takes a path, no URL",
                hint="without --transfer, --like and --out take URLs",
            )


def _measured(
    options: BenchOptions, plot: Path | None, compare: Path | None, tolerance: str, *, quiet: bool
) -> tuple[BenchReport | None, list[Change] | None]:
    """The report, and the changes against an earlier run; what is wrong is said before the run."""
    from ckptool.commands.bench.report import Baseline, parse_tolerance
    from ckptool.commands.bench.run import prepare_bench
    from ckptool.render.bench.bars import require_plottable
    from ckptool.render.bench.progress import bench_progress

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
    report: BenchReport, changes: list[Change] | None, plot: Path | None, *, as_json: bool
) -> None:
    """Exit 1 where something has become slower than it may."""
    from ckptool.render.bench.bars import write_plot
    from ckptool.render.bench.report import bench_json, show_bench
    from ckptool.render.messages import print_json

    if plot is not None:
        write_plot(report, plot)
    if as_json:
        print_json(bench_json(report, changes))
    else:
        show_bench(report, changes)
    if any(change.regressed for change in changes or ()):
        raise typer.Exit(1)


def _transfer(source: Path | None, size: str, out: Path, repeat: int, *, as_json: bool) -> None:
    from ckptool.commands.bench.transfer.run import transfer_bench
    from ckptool.core.units import parse_size
    from ckptool.render.bench.transfer import show_transfer_bench, transfer_bench_json
    from ckptool.render.messages import print_json, show_step

    report = transfer_bench(source, parse_size(size, "--size"), out, repeat, progress=show_step)
    if as_json:
        print_json(transfer_bench_json(report))
    else:
        show_transfer_bench(report)
