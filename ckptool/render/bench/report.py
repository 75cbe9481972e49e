"""The benchmark of save strategies: its progress on stderr, the screen, and ``ckptool.bench/2``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptool.commands.bench.baseline import Change
from ckptool.commands.bench.cost import Cost
from ckptool.commands.bench.report import BROKEN, BenchReport, Measured
from ckptool.commands.bench.words import advice, seconds, share
from ckptool.core.text import duration, duration_range, plural, size, visible
from ckptool.render.bench.bars import draw_bars, rate
from ckptool.render.messages import show_step
from ckptool.render.progress import is_live
from ckptool.render.text import columns, console, emit

if TYPE_CHECKING:
    from ckptool.commands.bench.launch import Emit
    from ckptool.commands.bench.run import PreparedBench

_DOING = {
    "limits": "what the hardware can do",
    "training": "training",
    "save": "saving",
    "checking": "changing parameters during a save, and loading it back",
    "aborting": "killing it in mid-save",
}


@contextmanager
def bench_progress(prepared: PreparedBench, *, quiet: bool) -> Iterator[Emit]:
    """Yield what shows the events of a run: a live bar on a terminal, else lines.

    Once it is known how fast the disk is, both say how long all takes.
    """
    live = is_live(quiet=quiet)
    if not live:
        yield (lambda event: None) if live is None else partial(_show_line, prepared)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bars = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(24), TimeElapsedColumn())
    words = TextColumn("{task.description}", markup=False)
    with Progress(*bars, words, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the ranks", total=len(prepared.names))

        def show(event: Mapping[str, Any]) -> None:
            kind = event["event"]
            if kind == "limits":
                _show_line(prepared, event, bar.console)
            elif kind in ("measured", "skipped", "failed"):
                bar.advance(task)
            elif kind in ("begin", "doing"):
                what = _DOING.get(event.get("what", ""), "")
                if event.get("what") == "save":
                    what += f" {event['number'] + 1} of {prepared.settings.repeat + 1}"
                bar.update(task, description=f"{event['name']}  {what}".rstrip())

        yield show


def _show_line(
    prepared: PreparedBench, event: Mapping[str, Any], screen: Console | None = None
) -> None:
    if event["event"] == "begin":
        show_step(f"measuring {event['name']}", screen)
    elif event["event"] == "limits" and (took := prepared.estimate(event["limits"] or {})):
        ways = f"{plural(len(prepared.names), 'way')} to save"
        show_step(f"about {duration_range(*took)}: {ways}, one after the other", screen)


_LONGEST = 24
_HEADINGS = "  strategy|blocked|overlapped|first|durable|steps|memory|pinned|device|saved state"
_OVERLAPPED, _FIRST, _MEMORY, _PINNED, _DEVICE = 2, 3, 6, 7, 8
_DISPENSABLE = (_MEMORY, _FIRST, _OVERLAPPED)
"""Columns that a narrow terminal omits, in this order."""

_COST_HEADINGS = "  strategy|a save costs|steps|every|of training time|a week|best interval"
_ONCE_STAGED = "consistent where training waits for the staging, as it does here; DIRTY without"
_COPIES = ("pinned", "registered", "pageable")
_LIMITS = {
    "from the device: ": {f"device_to_host_{kind}": kind for kind in _COPIES},
    "to the device: ": {f"host_to_device_{kind}": kind for kind in _COPIES},
    "": {
        "memory_copy": "memory copy",
        "write": "raw write and fsync",
        "upload": "raw upload",
    },
}
"""Lines of limits: what each begins with, and the words for those that are in it."""
_COUNTED = (
    "registered memory is in it, pinned memory is beside it, as far as torch's allocator in the"
    " training process has it; device: all that is used there, with the contexts of workers"
)
_LATE = "blocked, if training waits for the staging only before its next optimizer step"
_ABORT_HEADINGS = "strategy|killed in mid-save: the folder|processes|shared memory|temporary files"


def show_bench(report: BenchReport, changes: Sequence[Change] | None = None) -> None:
    """Show everything that was measured and where; and what could not be, with the reasons."""
    screen = console()
    rows = [[Text(heading, "dim") for heading in _HEADINGS.split("|")]]
    rows += [_row(report, result) for result in report.ranked]
    if report.settings.device == "cpu":
        _blank_column(rows, _DEVICE)
        _blank_column(rows, _PINNED)
    if not any(result.overlapped for result in report.results):
        _blank_column(rows, _OVERLAPPED)
    for column in _DISPENSABLE:
        if screen.is_terminal and _width(rows) > screen.width:
            _blank_column(rows, column)
    blank = Text()
    emit(screen, [*_heading(report), blank, *columns(screen, rows, "lrrrrrrrrl", cuts=0), blank])
    emit(screen, [*draw_bars(report, screen), blank])
    if costs := _cost_rows(report):
        emit(screen, [*columns(screen, costs, "lrrrrrr", cuts=0), blank])
    if report.settings.abort:
        emit(screen, [*columns(screen, _abort_rows(report), "lllll", cuts=2), blank])
    emit(screen, [*_notes(report), Text.assemble("  ", (visible(advice(report)), "bold"))])
    if changes is not None:
        emit(screen, [blank, *_change_lines(changes)])


def _width(rows: Sequence[Sequence[Text]]) -> int:
    """Return how many cells the rows take as columns."""
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    return sum(width + 2 for width in widths if width)


def _blank_column(rows: Sequence[list[Text]], column: int) -> None:
    for row in rows:
        row[column] = Text()


def _heading(report: BenchReport) -> list[Text]:
    settings, device = report.settings, report.settings.device
    ranks = plural(settings.ranks, f"{'CPU' if device == 'cpu' else device} rank")
    ranks += " with gloo, no accelerator" if device == "cpu" else ""
    return [
        Text.assemble(
            (size(settings.nbytes), "bold"),
            f" in {plural(settings.tensors, 'tensor')}, {visible(settings.source)};"
            f" {ranks}; first save and {settings.repeat} more",
        ),
        *describe_machine(report.machine, report.versions),
        *_limits(report),
    ]


def _limits(report: BenchReport) -> list[Text]:
    """Return a line for each kind of limit that was measured."""
    lines = []
    for start, names in _LIMITS.items():
        values = {name: value for name in names if (value := report.limits.get(name))}
        shown = ", ".join(f"{names[name]} {rate(value)}" for name, value in values.items())
        lines += [start + shown] if shown else []
    first, *rest = lines or ["could not be measured"]
    head = Text.assemble(("limits  ", "dim"), first)
    return [head, *(Text(f"        {line}") for line in rest)]


def describe_machine(
    machine: Mapping[str, str | int], versions: Mapping[str, str]
) -> tuple[Text, Text]:
    """Return two lines on the machine, which the figures depend on."""
    cores, memory = plural(int(machine["cores"]), "core"), size(int(machine["memory_bytes"]))
    return (
        Text(f"{cores} {machine['processor']}, {memory} memory, {machine['filesystem']}", "dim"),
        Text(", ".join(f"{name} {version}" for name, version in versions.items()), "dim"),
    )


def _row(report: BenchReport, result: Measured) -> list[Text]:
    name = _name(report, result)
    style = name.style
    slowdown = "" if result.slowdown is None else f"{result.slowdown:+.0%}"
    return [
        name,
        Text(seconds(result.blocked_median), style),
        Text("" if result.overlapped_median is None else seconds(result.overlapped_median), style),
        Text(seconds(result.blocked[0]), "dim"),
        Text(seconds(result.durable_median), style),
        Text(slowdown, style),
        Text(f"+ {size(result.host_extra)}", style),
        Text("" if result.pinned is None else f"+ {size(result.pinned)}", style),
        Text(f"+ {size(result.device_used or result.device_peak)}", style),
        _saved_state(result),
    ]


def _name(report: BenchReport, result: Measured) -> Text:
    """Return a strategy's name, in the style of its row; the best one is marked."""
    best = result is report.best
    style = "bold green" if best else "" if result.is_consistent else "dim"
    return Text(f"{'▸' if best else ' '} {visible(result.name)}", style)


def _saved_state(result: Measured) -> Text:
    consistency = result.consistency
    if not result.is_consistent:
        tensors = f" {len(consistency.tensors):,} of {consistency.of:,}"
        return Text.assemble((consistency.verdict, "bold red"), (tensors, "red"))
    if consistency.at_once:
        return Text("once staged", "yellow")
    return Text("consistent", "green")


def _cost_rows(report: BenchReport) -> list[list[Text]]:
    """Return a row per strategy, the cheapest first; none if nothing is known of the job."""
    if not report.training.is_known:
        return []
    rows = [[Text(heading, "dim") for heading in _COST_HEADINGS.split("|")]]
    for result in sorted(report.results, key=report.loss_of):
        name = _name(report, result)
        rows.append([name, *(Text(cell, name.style) for cell in _cost_cells(report.cost(result)))])
    return rows


def _cost_cells(cost: Cost) -> tuple[str, ...]:
    return (
        seconds(cost.save),
        "" if cost.steps is None else f"{cost.steps:.3g}",
        "" if cost.interval is None else duration(cost.interval),
        "" if cost.lost is None else share(cost.lost),
        "" if cost.hours_a_week is None else f"{cost.hours_a_week:.2g} h",
        "" if cost.daly is None else duration(cost.daly),
    )


def _abort_rows(report: BenchReport) -> list[list[Text]]:
    rows = [[Text(heading, "dim") for heading in _ABORT_HEADINGS.split("|")]]
    for result in report.ranked:
        if abort := result.abort:
            remark = " (the save was over before the kill)" if abort.finished else ""
            folder = Text(abort.folder + remark, "bold red" if abort.folder == BROKEN else "")
            leftovers = map(_leftovers, (abort.processes, abort.shared, abort.files))
            rows.append([Text(visible(result.name)), folder, *leftovers])
    return rows


def _leftovers(names: Sequence[str]) -> Text:
    if not names:
        return Text("none", "dim")
    first = visible(names[0].split(" -")[0].rpartition("/")[2])[:_LONGEST]
    return Text(f"{len(names):,}: {first}{', ...' if len(names) > 1 else ''}", "red")


def _notes(report: BenchReport) -> list[Text]:
    """Return remarks, failures and what could not run, one per line; then a blank one."""
    remarks: dict[str, list[str]] = {}
    for result in report.results:
        if result.remark:
            remarks.setdefault(result.remark, []).append(result.name)
    kinds = [("note", "yellow", f"{r} ({', '.join(n)})") for r, n in remarks.items()]
    if any(result.consistency.at_once for result in report.results):
        kinds.insert(0, ("once staged", "yellow", _ONCE_STAGED))
    if any(result.overlapped for result in report.results):
        kinds.insert(0, ("overlapped", "dim", _LATE))
    if report.settings.device != "cpu":
        kinds.append(("memory", "dim", _COUNTED))
    kinds += [("DIRTY", "bold red", words) for r in report.results if (words := _dirty(r))]
    kinds += [("failed", "bold red", f"{n}: {reason}") for n, reason in report.failed.items()]
    kinds += [("skipped", "yellow", f"{n}: {r}") for n, r in report.skipped.items()]
    lines = [Text.assemble("  ", (f"{k}: ", style), visible(words)) for k, style, words in kinds]
    return [*lines, Text()] if lines else []


def _dirty(result: Measured) -> str:
    """Return how a strategy's save differs, with the first elements that do; or nothing."""
    consistency = result.consistency
    if consistency.cause is None:
        return ""
    where = ""
    for difference in consistency.differences[:1]:
        ranges = ", ".join(f"{begin:,}:{end:,}" for begin, end in difference.ranges)
        where = f"; first {difference.tensor} on rank {difference.rank}"
        where += f", elements {ranges} of {difference.of:,}"
    return f"{result.name}: {consistency.cause}{where}"


def _change_lines(changes: Sequence[Change]) -> list[Text]:
    regressed = [change for change in changes if change.regressed]
    if not regressed:
        return [Text(f"  no regression in {plural(len(changes), 'value')}", "green")]
    return [Text.assemble("  ", ("regression: ", "bold red"), _change(c)) for c in regressed]


def _change(change: Change) -> str:
    if change.old is None or change.new is None:
        return visible(f"{change.name}: {change.why}")
    growth = f"{change.new / change.old - 1:+.0%}"
    old, new = seconds(change.old), seconds(change.new)
    return visible(f"{change.name}: {change.value} {new}, was {old} ({growth})")


def show_recommended(report: BenchReport) -> None:
    """Print the name of the best strategy and why, in one line."""
    prefix = "" if report.best is None or report.training.is_known else f"{report.best.name}: "
    console().print(f"{visible(prefix)}{visible(advice(report))}", markup=False, soft_wrap=True)
