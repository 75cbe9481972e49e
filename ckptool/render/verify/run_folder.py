"""Show which steps of a run are whole."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.text import Text

from ckptool.commands.document import document
from ckptool.commands.verify.run_folder import RunReport, StepReport
from ckptool.render.text import columns, console, emit, escaped, plural, visible


def show_latest_good(report: RunReport, *, quiet: bool) -> None:
    """The path alone on stdout; on stderr why newer steps were passed over."""
    if not quiet:
        screen = console(stderr=True)
        for step in report.verified:
            if not step.ok:
                path = escaped(str(step.step.path))
                reasons = escaped("; ".join(step.reasons))
                screen.print(f"[yellow]skipped[/] {path}: {reasons}", soft_wrap=True)
        if report.latest_good is None:
            screen.print(
                f"[bold red]no good checkpoint[/] in {escaped(str(report.path))}"
                f" ({plural(report.steps, 'step')})",
                soft_wrap=True,
            )
    if report.latest_good is not None:
        sys.stdout.buffer.write(os.fsencode(str(report.latest_good.step.path)) + b"\n")
        sys.stdout.buffer.flush()


def show_steps(report: RunReport) -> None:
    """A table of the steps, the newest first, then what to resume from."""
    screen = console()
    rows = [[Text(head, "dim") for head in ("step", "checkpoint", "format", "", "why")]]
    rows += [_row(one, report) for one in report.verified]
    emit(screen, columns(screen, rows, "rllll"))
    latest, whole = report.latest_good, sum(one.ok for one in report.verified)
    screen.print()
    if latest is None:
        screen.print(f"[bold red]FAILED[/]: no good step of {report.steps:,}")
        return
    path = escaped(str(latest.step.path))
    screen.print(
        f"[bold green]{whole:,} of {report.steps:,} steps OK[/]; latest good: {path}",
        soft_wrap=True,
    )


def _row(one: StepReport, report: RunReport) -> list[Text]:
    path = one.step.path
    name = str(path).removeprefix(f"{report.path}/")
    formats = dict.fromkeys(found.format or "?" for found in one.reports)
    is_latest = one is report.latest_good
    return [
        Text("" if one.step.number is None else str(one.step.number)),
        Text(visible(name), "bold" if is_latest else ""),
        Text(" + ".join(formats)),
        Text("OK", "bold green" if is_latest else "green") if one.ok else Text("FAILED", "red"),
        Text(visible("; ".join(one.reasons))),
    ]


def run_json(report: RunReport) -> dict[str, Any]:
    """Return the report as ``ckptool.verify-run/2``; ``latest_good`` is the path of that step."""
    latest = report.latest_good
    return document("verify-run", report, latest_good=latest and latest.path)
