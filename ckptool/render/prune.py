"""The fate of the steps of a run, on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.core.text import plural, size
from ckptool.render.messages import Line, say, show_lines
from ckptool.render.text import Cell, columns, console, emit

if TYPE_CHECKING:
    from ckptool.commands.runs.prune.fates import StepFate
    from ckptool.commands.runs.prune.prune import PruneReport

_COLORS = {"keep": "green", "strip": "cyan", "remove": "red", "leave": "yellow"}
_DONE = {"keep": "kept", "strip": "stripped", "remove": "removed", "leave": "left"}


def show_prune(report: PruneReport) -> None:
    """Show a table of the steps, newest first, then what was or would be removed."""
    screen = console()
    heads = ("step", "checkpoint", "size", "", "why")
    rows = [_row(step, report) for step in report.steps]
    emit(screen, columns(screen, rows, "rlrll", heads=heads))
    for leftover in report.leftovers:
        verb = "removed" if report.removed else "remove"
        say((verb, "red"), f" {leftover}: an earlier removal was interrupted")
    for stuck in report.stuck:
        reason = "an earlier removal was interrupted, and the rest cannot be removed"
        say(("left", "yellow"), f" {stuck.path}: {reason}: {stuck.problem}")
    show_lines([[], _summary(report)])
    if report.hint is not None:
        say(("hint:", "cyan"), f" {report.hint}")


def _row(step: StepFate, report: PruneReport) -> list[Cell]:
    entries = (str(path).removeprefix(f"{report.path}/") for path in (step.path, *step.beside))
    name = " + ".join(entries)
    word = _DONE[step.fate] if report.removed else step.fate
    return [
        "" if step.number is None else str(step.number),
        (name, "dim" if step.fate == "remove" else "bold"),
        size(step.nbytes),
        (word, "bold red" if step.ok is False else _COLORS[step.fate]),
        step.reason,
    ]


def _summary(report: PruneReport) -> Line:
    going, stripped = report.of_fate("remove"), report.of_fate("strip")
    good = f"{plural(report.good, 'good step')} {'are' if report.good != 1 else 'is'} kept"
    parts = [(plural(len(going), "step"), going)] if going or not stripped else []
    if stripped:
        parts.append((f"the optimizer of {plural(len(stripped), 'step')}", stripped))
    what = " and ".join(f"{name}, {size(sum(s.freed for s in steps))}" for name, steps in parts)
    if all(step.ok is None for step in report.steps):
        good = "no step was verified"
    if not going and not stripped and not report.leftovers:
        return [f"nothing to remove; {good}"]
    if report.removed:
        return [(f"removed {what}", "bold"), f"; {good}"]
    return [(f"would remove {what}", "bold"), f"; {good}. To remove, add --yes"]
