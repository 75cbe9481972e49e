"""Save strategies on the screen: a table by blocked time, bars, what was aborted, advice.

The benchmark of save strategies as ``ckptool.bench/1``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from ckptool.commands.bench.abort import BROKEN, Left
from ckptool.commands.bench.report import SCHEMA, BenchReport, Change, Measured, steady
from ckptool.render.bench.bars import bars
from ckptool.render.bench.progress import advice, rate, seconds
from ckptool.render.text import columns, console, emit, plural, size, visible

_LONGEST = 24
_HEADINGS = "  strategy|blocked|first|durable|steps|memory|device|saved state"
_DISPENSABLE = (5, 2)
"""Columns that a narrow terminal goes without, in this order."""

_ONCE_STAGED = "consistent where training waits for the staging, as it does here; DIRTY without"
_ABORT_HEADINGS = "strategy|killed in mid-save: the folder|processes|shared memory|temporary files"


def show_bench(report: BenchReport, changes: Sequence[Change] | None = None) -> None:
    """All that was measured and where; what could not be, with the reasons."""
    screen = console()
    accelerated = report.settings.device != "cpu"
    rows = [[Text(heading, "dim") for heading in _HEADINGS.split("|")]]
    rows += [_row(report, result, accelerated=accelerated) for result in report.ranked]
    if not accelerated:
        _without(rows, 6)
    for column in _DISPENSABLE:
        if screen.is_terminal and _cells(rows) > screen.width:
            _without(rows, column)
    blank = Text()
    emit(screen, [*_heading(report), blank, *columns(screen, rows, "lrrrrrrl", cuts=0), blank])
    emit(screen, [*bars(report, screen), blank])
    if report.settings.abort:
        emit(screen, [*columns(screen, _aborted(report), "lllll", cuts=2), blank])
    emit(screen, [*_aside(report), Text.assemble("  ", (advice(report), "bold"))])
    if changes is not None:
        emit(screen, [blank, *_compared(changes)])


def _cells(rows: Sequence[Sequence[Text]]) -> int:
    """How wide the rows are as columns."""
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    return sum(width + 2 for width in widths if width)


def _without(rows: Sequence[list[Text]], column: int) -> None:
    for row in rows:
        row[column] = Text()


def _heading(report: BenchReport) -> list[Text]:
    told, machine = report.settings, report.machine
    kind = "CPU ranks with gloo, no accelerator" if told.device == "cpu" else f"{told.device} ranks"
    cores = plural(int(machine["cores"]), "core")
    memory = size(int(machine["memory_bytes"]))
    limits = {
        "pinned copy": report.limits.get("device_to_host_pinned"),
        "pageable copy": report.limits.get("device_to_host_pageable"),
        "memory copy": report.limits.get("memory_copy"),
        "raw write and fsync": report.limits.get("write"),
        "raw upload": report.limits.get("upload"),
    }
    shown = ", ".join(f"{name} {rate(value)}" for name, value in limits.items() if value)
    return [
        Text.assemble(
            (size(told.nbytes), "bold"),
            f" in {plural(told.tensors, 'tensor')}, {visible(told.source)}; {told.ranks} {kind};"
            f" first save and {told.repeat} more",
        ),
        Text(f"{cores} {machine['processor']}, {memory} memory, {machine['filesystem']}", "dim"),
        Text(", ".join(f"{name} {version}" for name, version in report.versions.items()), "dim"),
        Text.assemble(("limits  ", "dim"), shown or "could not be measured"),
    ]


def _row(report: BenchReport, result: Measured, *, accelerated: bool) -> list[Text]:
    best = result is report.best
    style = "bold green" if best else "" if result.is_consistent else "dim"
    beside = "" if result.slowdown is None else f"{result.slowdown:+.0%}"
    return [
        Text(f"{'▸' if best else ' '} {visible(result.name)}", style),
        Text(seconds(result.blocked_median), style),
        Text(seconds(result.blocked[0]), "dim"),
        Text(seconds(result.durable_median), style),
        Text(beside, style),
        Text(f"+ {size(result.host_extra)}", style),
        Text(f"+ {size(result.device_peak)}" if accelerated else "", style),
        _check(result),
    ]


def _check(result: Measured) -> Text:
    found = result.consistency
    if not result.is_consistent:
        tensors = f" {len(found.tensors):,} of {found.of:,}"
        return Text.assemble((found.verdict, "bold red"), (tensors, "red"))
    if found.at_once:
        return Text("once staged", "yellow")
    return Text("consistent", "green")


def _aborted(report: BenchReport) -> list[list[Text]]:
    rows = [[Text(heading, "dim") for heading in _ABORT_HEADINGS.split("|")]]
    aborted = [(result.name, result.abort) for result in report.ranked if result.abort]
    return rows + [[Text(visible(name)), *_left(left)] for name, left in aborted]


def _left(left: Left) -> list[Text]:
    over = " (the save was over before the kill)" if left.finished else ""
    folder = Text(left.folder + over, "bold red" if left.folder == BROKEN else "")
    kinds = (left.processes, left.shared, left.files)
    return [folder, *(_leftovers(things) for things in kinds)]


def _leftovers(things: Sequence[str]) -> Text:
    if not things:
        return Text("none", "dim")
    first = visible(things[0].split(" -")[0].rpartition("/")[2])[:_LONGEST]
    return Text(f"{len(things):,}: {first}{', ...' if len(things) > 1 else ''}", "red")


def _aside(report: BenchReport) -> list[Text]:
    """Remarks, failures and what could not run, a line each; then a blank one."""
    remarks: dict[str, list[str]] = {}
    for result in report.results:
        if result.remark:
            remarks.setdefault(result.remark, []).append(result.name)
    kinds = [("note", "yellow", f"{r} ({', '.join(n)})") for r, n in remarks.items()]
    if any(result.consistency.at_once for result in report.results):
        kinds.insert(0, ("once staged", "yellow", _ONCE_STAGED))
    kinds += [("failed", "bold red", f"{n}: {reason}") for n, reason in report.failed.items()]
    kinds += [("left out", "yellow", f"{n}: {r}") for n, r in report.left_out.items()]
    lines = [Text.assemble("  ", (f"{k}: ", style), visible(words)) for k, style, words in kinds]
    return [*lines, Text()] if lines else []


def _compared(changes: Sequence[Change]) -> list[Text]:
    regressed = [change for change in changes if change.regressed]
    if not regressed:
        return [Text(f"  no regression in {plural(len(changes), 'value')}", "green")]
    return [Text.assemble("  ", ("regression: ", "bold red"), _words(c)) for c in regressed]


def _words(change: Change) -> str:
    if change.old is None or change.new is None:
        return visible(f"{change.name}: {change.why}")
    more = f"{change.new / change.old - 1:+.0%}"
    old, new = seconds(change.old), seconds(change.new)
    return visible(f"{change.name}: {change.value} {new}, was {old} ({more})")


def bench_json(report: BenchReport, changes: Sequence[Change] | None = None) -> dict[str, Any]:
    """Everything with every sample. Times are seconds, sizes bytes, rates bytes a second."""
    best = report.best
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": dict(report.machine),
        "versions": dict(report.versions),
        "settings": asdict(report.settings),
        "limits": dict(report.limits),
        "strategies": [_strategy(report, result) for result in report.ranked],
        "skipped": dict(report.left_out),
        "failed": dict(report.failed),
        "best": best.name if best else None,
        "advice": advice(report),
    }
    if changes is not None:
        told["compared"] = [asdict(change) for change in changes]
    return told


def _strategy(report: BenchReport, result: Measured) -> dict[str, Any]:
    nbytes = report.settings.nbytes
    return {
        "name": result.name,
        "library": result.library,
        "blocked": _times(result.blocked, nbytes, report.blocked_fraction(result)),
        "written": _times(result.written, nbytes, None),
        "durable": _times(result.durable, nbytes, report.durable_fraction(result)),
        "steps": {
            "before": list(result.before),
            "during": [list(steps) for steps in result.during],
            "after": list(result.after),
            "slowdown": result.slowdown,
        },
        "host_memory": {
            "base": result.host_base,
            "peak": result.host_peak,
            "extra": result.host_extra,
        },
        "device_memory": result.device_peak,
        "disk": {"bytes": result.nbytes, "files": result.files},
        "consistency": asdict(result.consistency),
        "abort": asdict(result.abort) if result.abort else None,
        "remark": result.remark,
    }


def _times(samples: Sequence[float], nbytes: int, fraction: float | None) -> dict[str, Any]:
    """``median``, ``lowest`` and ``highest`` are of the steady saves, without the first."""
    later = steady(samples)
    median = statistics.median(later)
    return {
        "first": samples[0],
        "median": median,
        "lowest": min(later),
        "highest": max(later),
        "bytes_per_second": nbytes / median,
        "of_limit": fraction,
        "samples": list(samples),
    }
