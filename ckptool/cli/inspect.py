"""``ckptool inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from ckptool.cli.completion import complete_names
from ckptool.cli.page import require_page, write_inspect_page, write_page
from ckptool.cli.parameters import SourcePath, parse_form
from ckptool.commands.options import parse_place
from ckptool.commands.options.declaration import OptionGroup
from ckptool.commands.options.inspect import FORMS, TABLES, InspectOptions
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.screen import Screen
from ckptool.errors import CkptoolError, Several, UsageError, damaged
from ckptool.storage.place import on_disk

if TYPE_CHECKING:
    from rich.console import Console

    from ckptool.commands.inspect.report import InspectReport
    from ckptool.commands.inspect.stats import StatsReport
    from ckptool.commands.reshard.holdings import MeshHoldings
    from ckptool.core.mesh import Mesh
    from ckptool.storage.url import Location


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
    options: InspectOptions,
    screen: Annotated[Screen, OptionGroup(without=("quiet",))],
) -> None:
    """Show what a checkpoint holds, from its metadata alone.

    Shows format, writer, step, device mesh and placements, tensors with repeated layers folded, and
    non-tensor values. Reads no tensor bytes, unpickles nothing, and does not need torch. At a URL,
    values stored among the data are read only with --values. For a run's folder, lists its steps.
    Shows a damaged checkpoint as far as it can be read, then its problems (exit code 3).
    """
    form = parse_form(options.form, FORMS, as_json=screen.as_json) or "text"
    options = replace(options, tensors=(*(names or ()), *options.tensors))
    views = options.views()
    _require_printable(form, views or ["tensors"], options.export)
    page_file = require_page(options.html)
    place = parse_place(source, "SRC")
    _require_one_place(source, names or ())
    reading = replace(options.read, values=options.values or on_disk(place) is not None)
    report = _inspect(place, reading, lists_steps=not (views or options.export))
    if report is None:
        _show_run(place, reading, page_file, form)
        return
    holdings = _hold(report, options.mesh) if options.mesh else None
    statistics = _read_stats(report, options.stats) if options.stats else None
    write_inspect_page(page_file, report, statistics)
    if form != "text":
        from ckptool.commands.inspect.views import inspect_json

        content = inspect_json(report, options, holdings, is_table=form != "json")
        content |= {} if statistics is None else statistics.more()
        _print_content(content, form, [*views, "tensors"][0])
    else:
        _show(report, options, holdings, statistics)
    if options.verbose:
        _show_traffic(report)
    if report.problems:
        _fail(report, reading, shown=form == "text")


def _show(
    report: InspectReport,
    options: InspectOptions,
    holdings: MeshHoldings | None,
    statistics: StatsReport | None,
) -> None:
    """Show a report on the screen, save that if it is asked, and show the notes."""
    from ckptool.render.inspect.report import show
    from ckptool.render.messages import show_notes
    from ckptool.render.text import console

    shown = console(record=options.export is not None)
    show(report, shown, options, holdings, () if statistics is None else statistics)
    if options.export is not None:
        _export(shown, options.export)
    show_notes(report.notes)


def _print_content(content: Mapping[str, Any], form: str, view: str) -> None:
    """Print a report's JSON, or one of its lists as a table."""
    from ckptool.render.data import print_json, print_table

    if form == "json":
        print_json(content)
    else:
        print_table(content[view], form)


def _require_printable(form: str, views: Sequence[str], export: Path | None) -> None:
    """Raise UsageError for several tables, or Unsupported for a file that cannot be written."""
    if form in TABLES and len(views) > 1:
        raise UsageError(
            f"--format {form} prints one table, not {' and '.join(views)}",
            hint="one command for each, or --json for all",
        )
    if export is None:
        return
    if form != "text":
        raise UsageError(f"--export saves the screen, which --format {form} leaves empty")
    from ckptool.render.inspect.report import EXPORT_MARK, require_exportable
    from ckptool.storage.disk import require_marked

    require_exportable(export)
    require_marked(export, EXPORT_MARK, noun="screen that ckptool exported")


def _export(screen: Console, file: Path) -> None:
    """Save the screen to a file."""
    from ckptool.render.inspect.report import EXPORT_MARK, export_screen
    from ckptool.storage.disk import write_whole

    write_whole(file, export_screen(screen), mark=EXPORT_MARK)


def _hold(report: InspectReport, mesh: Mesh) -> MeshHoldings:
    """Place the tensors on another mesh."""
    from ckptool.commands.reshard.holdings import hold_by_default

    return hold_by_default(report.opened, mesh)


def _require_one_place(source: str, names: Sequence[str]) -> None:
    """Raise UsageError if names of tensors are further places, as a shell makes of ``run/*``."""
    for name in names:
        if ("/" in name or Path(name).suffix) and Path(name).exists():
            raise UsageError(
                f"{name}: inspect shows one place, and {source} is that",
                hint=f"`ckptool diff SRC {quote(name)}` compares them; `ckptool inspect RUN`, on"
                " the folder around steps, lists all",
            )


def _read_stats(report: InspectReport, names: Sequence[str]) -> StatsReport:
    """Read the tensors of these names."""
    from ckptool.commands.inspect.stats import stats
    from ckptool.render.progress import shown_progress

    with shown_progress(quiet=False) as progress:
        return stats(report.opened, names, progress)


def _show_traffic(report: InspectReport) -> None:
    """Show how much was requested from a store, and read; on stderr."""
    from ckptool.core.text import plural, size

    text = "no store requests: the checkpoint is on a local disk"
    if report.traffic is not None:
        read = size(report.traffic.received)
        text = f"{plural(report.traffic.requests, 'request')}, {read} read"
    typer.echo(text, err=True)


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
    from ckptool.commands.inspect.report import inspect_readable
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
