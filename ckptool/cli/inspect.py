"""``ckptool inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckptool.cli.completion import complete_from, complete_names
from ckptool.cli.page import Html, require_page, write_inspect_page, write_page
from ckptool.cli.parameters import (
    AsJson,
    Debug,
    SourcePath,
    parse_form,
    parse_place,
)
from ckptool.commands.options.declaration import OptionGroup
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import NAMED
from ckptool.errors import CkptoolError, Several, UsageError, damaged
from ckptool.storage.place import on_disk

if TYPE_CHECKING:
    from rich.console import Console

    from ckptool.commands.inspect import InspectReport
    from ckptool.commands.inspect.stats import StatsReport
    from ckptool.commands.reshard.holdings import MeshHoldings
    from ckptool.storage.url import Location


TABLES = ("csv", "markdown")
FORMATS = ("text", "json", *TABLES)


def inspect(
    source: SourcePath = ".",
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            autocompletion=complete_names,
            help="Show only these tensors, or values if no tensor is named so.",
        ),
    ] = None,
    *,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensors",
            metavar="NAME",
            autocompletion=complete_names,
            help=f"List matching tensors in full: {NAMED} (repeatable).",
        ),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            metavar="NAME",
            autocompletion=complete_names,
            help="Draw a tensor, or all that match: which rank and file holds which box.",
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth",
            metavar="N",
            min=1,
            help="Group tensors by the first N parts of their names: count, size, element types.",
        ),
    ] = None,
    sort: Annotated[
        Literal["name", "size"],
        typer.Option("--sort", metavar="name|size", help="Sort tensors and modules."),
    ] = "name",
    rank_bytes: Annotated[
        bool, typer.Option("--rank-bytes", help="Show the bytes per rank, and the imbalance.")
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="MESH",
            help="Show what each rank of this mesh would hold after a reshard, and the largest:"
            " 2x4, 8, or dp=2,tp=4.",
        ),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Show the non-tensor values.")] = False,
    stats: Annotated[
        list[str] | None,
        typer.Option(
            "--stats",
            metavar="NAME",
            autocompletion=complete_names,
            help="Read matching tensors, '*' for all: min, max, mean, std, NaN, Inf (repeatable).",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Also save the screen as an .svg file."),
    ] = None,
    html: Html = None,
    reading: Annotated[ReadOptions, OptionGroup(without=("split_stacked",))],
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="For a URL, show how much was requested from the store."
        ),
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Print text, json (same as --json), or one table as csv or markdown: the tensors,"
            " or what --depth, --shards, --rank-bytes, --mesh, --values or --stats select; for a"
            " run, its steps.",
            autocompletion=complete_from(lambda: FORMATS),
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds, from its metadata alone.

    Shows format, writer, step, device mesh and placements, tensors with repeated layers folded, and
    non-tensor values. Reads no tensor bytes, unpickles nothing, and does not need torch. At a URL,
    values stored among the data are read only with --values. For a run's folder, lists its steps.
    Shows a damaged checkpoint as far as it can be read, then its problems (exit code 3).
    """
    from ckptool.render.inspect.report import inspect_json, show, show_traffic
    from ckptool.render.messages import show_notes
    from ckptool.render.text import console

    form = parse_form(form, FORMATS, as_json=as_json) or "text"
    tensors = [*(names or ()), *(tensors or ())]
    asked = {
        "stats": stats, "modules": depth, "shards": shards, "rank_bytes": rank_bytes,
        "holdings": mesh, "values": values, "tensors": tensors,
    }  # fmt: skip
    views = [view for view, option in asked.items() if option] or ["tensors"]
    _require_printable(form, views, export)
    page_file = require_page(html)
    place = parse_place(source, "SRC")
    _require_one_place(source, names or ())
    reading = replace(reading, values=values or on_disk(place) is not None)
    report = _inspect(place, reading, lists_steps=not any((*asked.values(), export)))
    if report is None:
        _show_run(place, reading, page_file, form)
        return
    held = _hold(report, mesh) if mesh else None
    statistics = _read_stats(report, stats) if stats else None
    write_inspect_page(page_file, report, statistics)
    if form != "text":
        content = inspect_json(
            report,
            tensors=tensors,
            ranks=rank_bytes,
            shards=shards,
            depth=depth,
            held=held,
            sort=None if sort == "name" and form == "json" else sort,
        )
        content |= {} if statistics is None else statistics.more()
        _print_content(content, form, views[0])
    else:
        screen = console(record=export is not None)
        show(
            report,
            screen,
            tensors=tensors,
            ranks=rank_bytes,
            values=values,
            shards=shards,
            stats=() if statistics is None else statistics,
            depth=depth,
            held=held,
            sort=sort,
        )
        if export is not None:
            _export(screen, export)
        show_notes(report.notes)
    if verbose:
        show_traffic(report)
    if report.problems:
        _fail(report, reading, shown=form == "text")


def _print_content(content: Mapping[str, Any], form: str, view: str) -> None:
    """Print a report's JSON, or one of its lists as a table."""
    from ckptool.render.messages import print_json
    from ckptool.render.tables import print_table

    if form == "json":
        print_json(content)
    else:
        print_table(content[view], form)


def _require_printable(form: str, views: Sequence[str], export: Path | None) -> None:
    """Raise UsageError for several tables, or Unsupported for a file that cannot be written."""
    from ckptool.render.inspect.report import EXPORT_MARK, require_exportable
    from ckptool.storage.disk import require_marked

    if form in TABLES and len(views) > 1:
        raise UsageError(
            f"--format {form} prints one table, not {' and '.join(views)}",
            hint="one command for each, or --json for all",
        )
    if export is None:
        return
    if form != "text":
        raise UsageError(f"--export saves the screen, which --format {form} leaves empty")
    require_exportable(export)
    require_marked(export, EXPORT_MARK, noun="screen that ckptool exported")


def _export(screen: Console, file: Path) -> None:
    """Save the screen to a file."""
    from ckptool.render.inspect.report import EXPORT_MARK, export_screen
    from ckptool.storage.disk import write_whole

    write_whole(file, export_screen(screen), mark=EXPORT_MARK)


def _hold(report: InspectReport, mesh: str) -> MeshHoldings:
    """Place the tensors on another mesh."""
    from ckptool.commands.reshard.holdings import hold_by_default
    from ckptool.core.sharding.placement import parse_mesh

    return hold_by_default(report.opened, parse_mesh(mesh))


def _require_one_place(source: str, names: Sequence[str]) -> None:
    """Raise UsageError if names of tensors are further places, as a shell makes of ``run/*``."""
    for name in names:
        if ("/" in name or Path(name).suffix) and Path(name).exists():
            raise UsageError(
                f"{name}: inspect shows one place, and {source} is that",
                hint=f"`ckptool diff SRC {quote(name)}` compares them; `ckptool inspect RUN`, on"
                " the folder around steps, lists all",
            )


def _read_stats(report: InspectReport, names: list[str]) -> StatsReport:
    """Read the tensors of these names."""
    from ckptool.commands.inspect.stats import stats
    from ckptool.render.progress import started_progress

    with started_progress(quiet=False) as started:
        return stats(report.opened, names, started)


def _fail(report: InspectReport, reading: ReadOptions, *, shown: bool) -> None:
    """Raise the error of a damaged checkpoint once shown; with data on stdout, exit with it."""
    from ckptool.commands.verify.codes import next_step
    from ckptool.commands.verify.salvage.offer import offering_salvage
    from ckptool.render.messages import show_error

    try:
        with offering_salvage(report.path, reading):
            raise report.error or damaged(list(report.problems), subject=str(report.path))
    except CkptoolError as error:
        error.hint = next_step(error)
        error.add_hint(f"`ckptool verify {quote(str(report.path))}` checks the data, too")
        if shown:
            raise
        show_error(error)
        raise typer.Exit(error.exit_code) from None


def _inspect(place: Location, reading: ReadOptions, *, lists_steps: bool) -> InspectReport | None:
    """Return what a checkpoint holds; None for a run's folder whose steps are to be listed."""
    from ckptool.commands.inspect import inspect_readable
    from ckptool.commands.runs.search import is_run

    if lists_steps and is_run(place):
        return None
    try:
        return inspect_readable(place, reading)
    except Several:
        if not lists_steps or not place.is_dir():
            raise
    return None


def _show_run(run: Location, reading: ReadOptions, page_file: Path | None, form: str) -> None:
    """Show the steps of a run."""
    from ckptool.commands.inspect.steps import list_steps
    from ckptool.render.inspect.steps import steps_lines
    from ckptool.render.text import console, emit

    listed = list_steps(run, reading)
    write_page(page_file, listed.to_dict)
    if form != "text":
        _print_content(listed.to_dict(), form, "steps")
    else:
        screen = console()
        emit(screen, steps_lines(listed, screen))
