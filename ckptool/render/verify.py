"""The findings of verify on the screen, and the codes as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ckptool.commands.document import document
from ckptool.commands.verify.codes import CODES, Severity
from ckptool.commands.verify.findings import SIDES, Finding, VerifyReport
from ckptool.commands.verify.salvage.offer import salvage_offer
from ckptool.core.text import plural, size
from ckptool.render.data import print_json_line
from ckptool.render.messages import say, show_lines

if TYPE_CHECKING:
    from ckptool.commands.runs.assessment import StepReport
    from ckptool.commands.runs.verify import RunReport
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.commands.verify.compare.coverage import Coverage
    from ckptool.commands.verify.salvage.salvage import SalvageReport
    from ckptool.engine.check.difference import DifferingTensor
    from ckptool.render.text import Cell

_COLORS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_MOST_FINDINGS = 8
_MOST_LINES = 12


def show_verify(report: VerifyReport) -> None:
    """Show what was read, each kind of finding with its hint, then the summary."""
    say((str(report.path), "bold"), f"  {report.format}")
    read = f", {size(report.nbytes)} read" if report.depth != "quick" else ""
    tensors = f"{plural(report.tensors, 'tensor')} in " if report.tensors else ""
    say((f"  {tensors}{plural(report.files, 'file')}{read}", "dim"))
    show_findings(report.findings)
    if not report.ok and (offer := salvage_offer(report)):
        show_lines([[], [("hint:", "cyan"), f" {offer}"]])
    show_summary_line(report.summary, ok=report.ok)


def show_findings(findings: Iterable[Finding]) -> None:
    """Show each kind of finding with its hint, most severe first."""
    by_code = sorted(findings, key=lambda finding: (finding.severity.place, finding.code))
    for code, group in groupby(by_code, key=lambda finding: finding.code):
        members = list(group)
        severity, hint = members[0].severity, members[0].hint
        word, meaning = (severity.value, _COLORS[severity]), (CODES[code].meaning, "dim")
        show_lines([[], [word, " ", (code, "bold"), "  ", meaning]])
        _print_some([finding.message for finding in members], _MOST_FINDINGS)
        if hint:
            say("  ", ("hint:", "cyan"), f" {hint}")


def show_summary_line(summary: str, *, ok: bool) -> None:
    """Show the one line that summarizes a report, its first word in color."""
    color = "bold green" if ok else "bold red"
    answer, mark, rest = summary.partition(":")
    show_lines([[], [(answer, color), f"{mark}{rest}"]])


def _print_some(lines: Sequence[str], most: int = _MOST_LINES) -> None:
    show_lines([[f"  {line}"] for line in lines[:most]])
    _print_more(len(lines) - most)


def _print_more(count: int) -> None:
    if count > 0:
        say((f"  and {count:,} more; --json lists all", "dim"))


def show_against(report: AgainstReport) -> None:
    """Show structural differences, then the tensors whose values differ, then the summary."""
    _show_sides(report)
    show_findings([f for f in report.verify.findings if f.code != "tensor-differs"])
    _show_differing(report.differing)
    show_summary_line(report.verify.summary, ok=report.verify.ok)


def _show_sides(report: AgainstReport) -> None:
    """Show the two sides, and how much of them was compared."""
    from ckptool.render.text import columns, console, emit

    screen = console()
    paths = report.verify.path, report.other
    formats = report.verify.format, report.other_format
    coverages = report.coverage or (None, None)
    texts = ["" if part is None else _coverage_text(part) for part in coverages]
    rows = [
        ((side, "dim"), (str(path), "bold"), name or "cannot be read", (text, "dim"))
        for side, path, name, text in zip(SIDES, paths, formats, texts, strict=True)
    ]
    emit(screen, columns(screen, rows, "llll"))


def _coverage_text(coverage: Coverage) -> str:
    """Return text such as ``34 of 136 tensors, 8.13 MiB of 24.4 MiB, 0 of 16 values compared``."""
    part, total = coverage.compared, coverage.total
    tensors = f"{part.tensors:,} of {plural(total.tensors, 'tensor')}"
    nbytes = f"{size(part.nbytes)} of {size(total.nbytes)}"
    values = f", {part.values:,} of {plural(total.values, 'value')}" if total.values else ""
    return f"{tensors}, {nbytes}{values} compared"


def _show_differing(tensors: tuple[DifferingTensor, ...]) -> None:
    """Show a line per tensor, then both sides of the first differing element, and where it is."""
    if not tensors:
        return
    from ckptool.render.text import columns, console, emit

    say()
    screen = console()
    heads = ("tensor", "differ", "of", "largest", "first at")
    shown = tensors[:_MOST_LINES]
    rows = [
        (
            (tensor.name, "bold"),
            (f"{tensor.differing:,}", "red"),
            f"{tensor.elements:,}",
            "" if tensor.largest is None else f"{tensor.largest:.3g}",
            str(list(tensor.first)),
        )
        for tensor in shown
    ]
    head, *lines = columns(screen, rows, "lrrrl", heads=heads, cuts=0)
    emit(screen, [head])
    for tensor, line in zip(shown, lines, strict=True):
        sides = zip(SIDES, (tensor.a, tensor.b), strict=True)
        elements = [((f"  {side}", "dim"), at.value, (at.place, "dim")) for side, at in sides]
        emit(screen, [line, *columns(screen, elements, "lll")])
    _print_more(len(tensors) - _MOST_LINES)


def show_latest_good(report: RunReport, *, quiet: bool) -> None:
    """Print the path alone on stdout, and on stderr why newer steps were skipped."""
    latest = report.latest_good
    if not quiet:
        for step in report.steps:
            if (remarks := _remarks(step)) or not step.ok:
                word = "not all checked" if step.ok else "skipped"
                say((word, "yellow"), f" {step.path}: {remarks}", stderr=True)
        if latest is not None:
            say((f"newest {report.chosen}", "dim"), stderr=True)
        else:
            run = f" in {report.path} ({plural(report.total, 'step')})"
            say(("no good checkpoint", "bold red"), run, stderr=True)
    if latest is not None:
        sys.stdout.buffer.write(os.fsencode(str(latest.path)) + b"\n")
        sys.stdout.buffer.flush()


def show_steps(report: RunReport) -> None:
    """Show a table of the steps, newest first, then the one to resume from."""
    from ckptool.render.text import columns, console, emit

    screen = console()
    heads = ("step", "checkpoint", "format", "", "why")
    rows = [_step_row(step, report) for step in report.steps]
    emit(screen, columns(screen, rows, "rllll", heads=heads))
    latest, good = report.latest_good, sum(step.ok for step in report.steps)
    if latest is None:
        show_lines([[], [("FAILED", "bold red"), f": no good step of {report.total:,}"]])
        return
    counts = f"{good:,} of {report.total:,} steps OK", "bold green"
    show_lines([[], [counts, f"; latest good: {latest.path}"]])


def show_followed(report: StepReport, code: int | None, *, as_json: bool) -> None:
    """Show a step as one line or one line of JSON, with its command's exit ``code``, if any."""
    if as_json:
        print_json_line(report.to_dict() | ({} if code is None else {"then": code}))
        return
    answer = [("OK", "bold green"), "    "] if report.ok else [("FAILED", "bold red")]
    remarks = [_remarks(report)] if _remarks(report) else []
    remarks += [f"the command ended with {code}"] if code else []
    suffix = f"  {'; '.join(remarks)}" if remarks else ""
    say(*answer, f" {report.path}{suffix}")


def _step_row(step: StepReport, report: RunReport) -> list[Cell]:
    name = str(step.path).removeprefix(f"{report.path}/")
    formats = dict.fromkeys(part.format or "?" for part in step.reports)
    is_latest = step is report.latest_good
    return [
        "" if step.number is None else str(step.number),
        (name, "bold" if is_latest else ""),
        " + ".join(formats),
        ("OK", "bold green" if is_latest else "green") if step.ok else ("FAILED", "red"),
        _remarks(step),
    ]


def _remarks(step: StepReport) -> str:
    """Return why a step is not good, or which of its errors are ignored."""
    ignored = [part.ignored_text.removeprefix("; ") for part in step.reports]
    return "; ".join(filter(None, [*step.reasons, *ignored]))


def show_salvage(report: SalvageReport) -> None:
    """Show the problems, what is lost and why, what is unknown, then what was written."""
    say((report.path, "bold"), f"  {report.format}")
    _show_some("problems", report.problems)
    _show_lost(report)
    _show_some("unknown", report.unknown)
    _show_some("notes", report.notes)
    if report.unproved:
        tensors = plural(report.unproved, "tensor")
        why = "complete, but changed values cannot be detected"
        _show_some("no checksum", [f"{tensors}: {why}"])
    _show_end(report)


def _show_some(head: str, lines: Sequence[str]) -> None:
    if lines:
        show_lines([[], [(head, "bold yellow")]])
        _print_some([line.partition("\n")[0] for line in lines])


def _show_lost(report: SalvageReport) -> None:
    if not report.lost:
        return
    from ckptool.render.text import columns, console, emit

    screen = console()
    show_lines([[], [("lost", "bold red")]])
    rows = []
    for name, why in list(report.lost.items())[:_MOST_LINES]:
        reason = why.partition("\n")[0].removeprefix(f"{name}: ").removeprefix(f"{name} ")
        rows.append(((name, "bold"), reason))
    emit(screen, columns(screen, rows, "ll"))
    _print_more(len(report.lost) - _MOST_LINES)


def _show_end(report: SalvageReport) -> None:
    counts = f"{plural(report.tensors, 'tensor')}, {plural(report.values, 'value')}"
    if report.complete:
        head = "nothing lost", "bold green"
    elif report.lost:
        head = f"{len(report.lost):,} lost", "bold red"
    else:
        head = "all known names recovered", "bold yellow"
    rest = f" ({report.target_format}): {counts}, {size(report.nbytes)}"
    show_lines([[], [head, "; wrote ", (report.target, "bold"), rest]])
    say(f"full list: {report.listing}")


def show_codes() -> None:
    """Show every code with its severity and meaning, one per line."""
    width = max(map(len, CODES))
    show_lines(
        [f"{name:<{width}}  {code.severity.value:<7}  {code.meaning}"]
        for name, code in CODES.items()
    )


def codes_json() -> dict[str, Any]:
    """Return the codes as ``ckptool.codes/2``."""
    shown = ("severity", "meaning", "hint")
    rows = [{"code": n} | {key: getattr(c, key) for key in shown} for n, c in CODES.items()]
    return document("codes", codes=rows)
