"""The table of measured commands, each with its peers."""

from __future__ import annotations

from rich.text import Text

from benchmarks.report import Ratio, RowResult, TransferBenchReport
from ckptool.core.text import plural, size, visible
from ckptool.render.bench.report import describe_machine
from ckptool.render.text import columns, console, emit

_HEADINGS = ("command", "median", "all rounds", "speed", "peak memory", "against its peers")


def show_transfer_bench(report: TransferBenchReport) -> None:
    """Show what was measured and where, the rows, and what was skipped."""
    screen = console()
    blank = Text()
    skipped = [
        Text.assemble("  ", ("skipped: ", "yellow"), visible(f"{name}: {reason}"))
        for name, reason in report.skipped.items()
    ]
    rows = [[Text(heading, "bold") for heading in _HEADINGS]]
    for result in report.results:
        rows += _rows(report, result)
    emit(screen, [*_heading(report), blank, *columns(screen, rows, "lrrrrl")])
    emit(screen, [blank, *skipped] if skipped else [])


def _heading(report: TransferBenchReport) -> list[Text]:
    return [
        Text.assemble(
            (size(report.nbytes), "bold"),
            f" in {plural(report.files, 'file')}, {visible(report.source)};"
            f" {plural(report.repeat, 'round')}, interleaved, {report.conditions}",
        ),
        *describe_machine(report.machine, report.versions),
    ]


def _rows(report: TransferBenchReport, result: RowResult) -> list[list[Text]]:
    """Return the row's line, and one more for each further remark."""
    style = "" if result.row.peers or result.row.measure == "cpu" else "dim"
    unit = "s CPU" if result.row.measure == "cpu" else "s"
    first, *others = [*_remarks(report, result), Text()]
    cells = (
        result.row.name,
        f"{result.median:.2f} {unit}",
        f"{min(result.values):.2f} to {max(result.values):.2f}",
        f"{size(int(result.nbytes / result.median))}/s" if result.nbytes else "",
        size(result.peak_bytes),
    )
    line = [Text(cell, style) for cell in cells] + [first]
    return [line] + [[Text()] * len(cells) + [remark] for remark in others if remark]


def _remarks(report: TransferBenchReport, result: RowResult) -> list[Text]:
    remarks = [_ratio(ratio) for ratio in report.ratios(result)]
    if result.requests:
        remarks.append(Text(_traffic(result)))
    elif result.read_bytes:
        remarks.append(Text(f"reads {size(result.read_bytes)}"))
    if result.imports_torch is not None:
        loads = result.imports_torch
        remarks.append(
            Text("imports torch", "red") if loads else Text("torch not imported", "green")
        )
    return remarks


def _traffic(result: RowResult) -> str:
    """Return text such as ``40 requests, reads 1.00 x, 0.6 s CPU``: multiples of the size."""
    words = [plural(result.requests, "request"), f"reads {result.read_bytes / result.nbytes:.2f} x"]
    if result.written_bytes > result.nbytes / 100:
        words.append(f"writes {result.written_bytes / result.nbytes:.2f} x")
    return ", ".join([*words, f"{result.cpu:.2f} s CPU"])


def _ratio(ratio: Ratio) -> Text:
    """Return text such as ``1.20 x cp -r``, or how many times faster if at least twice as fast."""
    if ratio.value > 0.5:
        spread = f"({ratio.lowest:.2f} to {ratio.highest:.2f})"
        return Text.assemble((f"{ratio.value:.2f} x", "bold"), f" {ratio.peer} {spread}")
    spread = f"({1 / ratio.highest:.1f} to {1 / ratio.lowest:.1f})"
    faster = (f"{1 / ratio.value:.1f} x faster", "bold")
    return Text.assemble(faster, f" than {ratio.peer} {spread}")
