"""Show what verify found: on the screen, as JSON, as JUnit, as annotations."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from ckptool.commands.document import document
from ckptool.commands.verify.codes import CODES, Severity
from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.errors import TransferError
from ckptool.render.text import console, escaped, plural, size, visible

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_SHOWN = 8


def show_verify(report: VerifyReport) -> None:
    """What was looked at, each kind of finding with its hint, then the one sentence."""
    screen = console()
    _line(screen, f"[bold]{escaped(str(report.path))}[/]  {report.format}")
    read = f", {size(report.nbytes)} read" if report.depth != "quick" else ""
    tensors = f"{plural(report.tensors, 'tensor')} in " if report.tensors else ""
    _line(screen, f"  [dim]{tensors}{plural(report.files, 'file')}{read}[/]")
    show_findings(report.findings, screen)
    show_summary(report, screen)


def show_findings(findings: Iterable[Finding], screen: Console) -> None:
    """Each kind of finding with its hint, the gravest first."""
    by_code = sorted(findings, key=lambda finding: _order(finding))
    for _, group in groupby(by_code, key=lambda finding: finding.code):
        _show_group(screen, list(group))


def show_summary(report: VerifyReport, screen: Console) -> None:
    """What it all comes to."""
    colour = "bold green" if report.ok else "bold red"
    _line(screen, "")
    first, mark, rest = report.summary.partition(":")
    _line(screen, f"[{colour}]{escaped(first)}[/]{mark}{escaped(rest)}")


def _order(finding: Finding) -> tuple[int, str]:
    return list(Severity).index(finding.severity), finding.code


def _show_group(screen: Console, group: list[Finding]) -> None:
    first = group[0]
    _line(screen, "")
    colour, severity = _COLOURS[first.severity], first.severity.value
    meaning = CODES[first.code].meaning
    _line(screen, f"[{colour}]{severity}[/] [bold]{first.code}[/]  [dim]{escaped(meaning)}[/]")
    for finding in group[:_SHOWN]:
        _line(screen, f"  {escaped(finding.message)}")
    if len(group) > _SHOWN:
        _line(screen, f"  [dim]and {len(group) - _SHOWN:,} more; --json lists all[/]")
    if first.hint:
        _line(screen, f"  [cyan]hint:[/] {escaped(first.hint)}")


def _line(screen: Console, text: str) -> None:
    screen.print(text, highlight=False, soft_wrap=True)


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """Return the report as one JSON object, schema ``ckptool.verify/2``."""
    return document("verify", report)


def write_junit(report: VerifyReport, target: Path, *, strict: bool) -> None:
    """One test case a code, failed where it was found; TransferError where it cannot be written."""
    by_code: dict[str, list[Finding]] = {code: [] for code in CODES}
    for finding in report.findings:
        by_code[finding.code].append(finding)
    failed = {finding.code for finding in report.fails(strict)}
    suite = ElementTree.Element(
        "testsuite", name="ckptool verify", tests=str(len(by_code)), failures=str(len(failed))
    )
    for code, found in by_code.items():
        case = ElementTree.SubElement(suite, "testcase", classname="ckptool.verify", name=code)
        text = "\n".join(visible(finding.message) for finding in found)
        if code in failed:
            failure = ElementTree.SubElement(case, "failure", message=CODES[code].meaning)
            failure.text = text
        elif found:
            ElementTree.SubElement(case, "system-out").text = text
    try:
        ElementTree.ElementTree(suite).write(target, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise TransferError(f"{target}: cannot be written: {error.strerror}") from None


def show_annotations(report: VerifyReport, *, stderr: bool) -> None:
    """GitHub workflow commands, one a finding above information; see its documentation."""
    screen = console(stderr=stderr)
    for finding in report.findings:
        if finding.severity is not Severity.INFO:
            screen.print(_annotation(report, finding), markup=False, soft_wrap=True)


def _annotation(report: VerifyReport, finding: Finding) -> str:
    path = report.path
    folder = path if path.is_dir() else path.parent
    file = folder / finding.file if finding.file else path
    fields = {"file": str(file), "title": f"ckptool {finding.code}"}
    named = ",".join(f"{key}={_property(value)}" for key, value in fields.items())
    return f"::{_LEVELS[finding.severity]} {named}::{_data(visible(finding.message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(visible(text)).replace(":", "%3A").replace(",", "%2C")


def codes_text() -> Iterable[str]:
    """Every code with its severity and meaning, a line each."""
    width = max(map(len, CODES))
    for name, code in CODES.items():
        yield f"{name:<{width}}  {code.severity.value:<7}  {code.meaning}"


def show_codes() -> None:
    """The table of codes."""
    screen = console()
    for line in codes_text():
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def codes_json() -> dict[str, Any]:
    """Return the codes as ``ckptool.codes/2``."""
    return document(
        "codes", codes=[{"code": name} | code._asdict() for name, code in CODES.items()]
    )
