"""Show which steps of a run are whole."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.text import Text

from ckptool.commands.verify.run_folder import RunReport, StepReport
from ckptool.render.text import columns, console, emit, escaped, visible
from ckptool.render.verify.report import verify_json


def show_latest_good(report: RunReport, *, quiet: bool) -> None:
    """The path alone on stdout; on stderr why newer steps were passed over."""
    if not quiet:
        screen = console(stderr=True)
        for step in report.verified:
            if not step.whole:
                path = escaped(str(step.step.path))
                reasons = escaped("; ".join(step.reasons))
                screen.print(f"[yellow]passed over[/] {path}: {reasons}", soft_wrap=True)
        if report.latest_good is None:
            screen.print(f"[bold red]No step is whole[/] of {report.steps:,} in {report.path}.")
    if report.latest_good is not None:
        sys.stdout.buffer.write(os.fsencode(str(report.latest_good.step.path)) + b"\n")
        sys.stdout.buffer.flush()


def show_steps(report: RunReport) -> None:
    """A table of the steps, the newest first, then what to resume from."""
    screen = console()
    rows = [[Text(head, "dim") for head in ("step", "checkpoint", "format", "", "why")]]
    rows += [_row(one, report) for one in report.verified]
    emit(screen, columns(screen, rows, "rllll"))
    latest, whole = report.latest_good, sum(one.whole for one in report.verified)
    screen.print()
    if latest is None:
        screen.print(f"[bold red]No step is whole[/] of {report.steps:,}.")
        return
    path = escaped(str(latest.step.path))
    screen.print(
        f"[bold green]{whole:,} of {report.steps:,} steps are whole[/]; the newest of them: {path}",
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
        Text("whole", "bold green" if is_latest else "green") if one.whole else Text("no", "red"),
        Text(visible("; ".join(one.reasons))),
    ]


def run_json(report: RunReport) -> dict[str, Any]:
    """The report as ``ckptool.verify-run/1``."""
    latest = report.latest_good
    return {
        "schema": "ckptool.verify-run/1",
        "path": str(report.path),
        "latest_good": None if latest is None else str(latest.step.path),
        "steps": report.steps,
        "verified": [_step_json(one) for one in report.verified],
    }


def _step_json(one: StepReport) -> dict[str, Any]:
    return {
        "path": str(one.step.path),
        "step": one.step.number,
        "sound": one.whole,
        "reasons": list(one.reasons),
        "checkpoints": [verify_json(report) for report in one.reports],
    }
