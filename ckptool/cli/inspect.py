"""``ckptool inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptool.cli.options import AsJson, Debug, PerRank, Reading, SourcePath
from ckptool.errors import UsageError, damaged


def inspect(
    source: SourcePath = ".",
    *,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensors", metavar="GLOB", help="List every matching tensor in full (repeatable)."
        ),
    ] = None,
    map_name: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="NAME",
            help="Draw one tensor: which rank and file holds which box (no key map).",
        ),
    ] = None,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show the bytes of each rank, and the imbalance.")
    ] = False,
    values: Annotated[bool, typer.Option("--values", help="Show the non-tensor values.")] = False,
    stats: Annotated[
        list[str] | None,
        typer.Option(
            "--stats",
            metavar="GLOB",
            help="Read what matches: min, max, mean, std, NaN, Inf (repeatable).",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Also keep the screen as .svg or .html."),
    ] = None,
    reading: Annotated[Reading, "How to read SRC"],
    per_rank: PerRank = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Say how much was asked of the store, for a URL."),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds, from its metadata alone.

    Format, writer, step, device mesh and placements, tensors with repeated layers folded, and
    non-tensor values. No tensor byte is read, nothing is unpickled, torch is not needed. Of a URL,
    values that lie among the data are read only with --values.
    """
    from dataclasses import replace

    from ckptool.cli.options import parse_place
    from ckptool.commands.inspect.inspect import inspect as run_inspect
    from ckptool.render.inspect.report import (
        export_mark,
        exported,
        inspect_json,
        require_exportable,
        show,
        show_traffic,
    )
    from ckptool.render.inspect.stats import stats_json
    from ckptool.render.messages import print_json, show_error, show_notes
    from ckptool.render.text import console
    from ckptool.storage.disk import require_marked, write_whole

    if export is not None:
        if as_json:
            raise UsageError("--export keeps the screen, and --json leaves it empty: one of them")
        require_exportable(export)
        require_marked(export, export_mark(export), noun="screen that ckptool exported")
    place = parse_place(source, "SRC")
    asked = reading.options(per_rank=per_rank)
    report = run_inspect(place, replace(asked, values=values or isinstance(place, Path)))
    found = None
    if stats:
        from ckptool.commands.inspect.stats import stats as run_stats

        found = run_stats(report.opened, stats)
    if as_json:
        told = inspect_json(report, tensors=tensors or (), ranks=ranks, map_name=map_name)
        print_json(told | (stats_json(found) if found is not None else {}))
    else:
        screen = console(record=export is not None)
        show(
            report,
            screen,
            tensors=tensors or (),
            ranks=ranks,
            values=values,
            map_name=map_name,
            stats=found or (),
        )
        if export is not None:
            write_whole(export, exported(screen, export), mark=export_mark(export))
        show_notes(report.notes)
    if verbose:
        show_traffic(report)
    if report.problems:
        error = damaged(list(report.problems), subject=str(report.path))
        if not as_json:
            raise error
        show_error(error)
        raise typer.Exit(error.exit_code)
