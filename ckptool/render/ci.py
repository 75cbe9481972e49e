"""The findings of verify for CI systems: JUnit, and GitHub annotations."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.verify.answer import Suite
from ckptool.commands.verify.codes import ALWAYS, CODES, Severity
from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.core.text import plural, visible
from ckptool.render.text import console

if TYPE_CHECKING:
    from xml.etree import ElementTree

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning"}
MOST_ANNOTATIONS = 10
"""GitHub shows no more of each level for a step."""


def print_junit(suites: Iterable[Suite], *, strict: bool) -> None:
    """Print JUnit: a suite per checkpoint, with a case per check."""
    from xml.etree import ElementTree

    root = ElementTree.Element("testsuites", name="ckptool verify")
    for suite in suites:
        root.append(_suite(suite, strict=strict))
    ElementTree.indent(root)
    sys.stdout.write(ElementTree.tostring(root, encoding="unicode", xml_declaration=True))
    sys.stdout.write("\n")
    sys.stdout.flush()


def _suite(suite: Suite, *, strict: bool) -> ElementTree.Element:
    from xml.etree import ElementTree

    report = suite.report
    path = visible(str(report.path))
    failing = {id(finding) for finding in report.fails(strict)}
    by_check: dict[str, list[Finding]] = {check: [] for check in (*ALWAYS, *suite.asked)}
    for finding in report.findings:
        by_check.setdefault(CODES[finding.code].check, []).append(finding)
    element = ElementTree.Element("testsuite", name=path)
    failures = 0
    for check, findings in by_check.items():
        case = ElementTree.SubElement(element, "testcase", classname=path, name=check)
        failed = [finding for finding in findings if id(finding) in failing]
        if failed:
            failures += 1
            message = CODES[failed[0].code].meaning
            ElementTree.SubElement(case, "failure", message=message).text = _lines(failed)
        rest = [finding for finding in findings if id(finding) not in failing]
        if rest:
            ElementTree.SubElement(case, "system-out").text = _lines(rest)
    if suite.reasons:
        failures += 1
        case = ElementTree.SubElement(element, "testcase", classname=path, name="step")
        text = "\n".join(map(visible, suite.reasons))
        ElementTree.SubElement(case, "failure", message="not a good step").text = text
    element.attrib |= {"tests": str(len(element)), "failures": str(failures)}
    return element


def _lines(findings: Iterable[Finding]) -> str:
    return "\n".join(f"{finding.code}: {visible(finding.message)}" for finding in findings)


def show_annotations(reports: Iterable[VerifyReport], *, stderr: bool) -> None:
    """Print GitHub workflow commands: one per cause, errors first, at most ten."""
    pairs = [
        (report, finding)
        for level in _LEVELS
        for report in reports
        for finding in report.findings
        if finding.severity is level
    ]
    screen = console(stderr=stderr)
    for report, finding in pairs[:MOST_ANNOTATIONS]:
        screen.print(annotation(report, finding), markup=False, soft_wrap=True)
    rest = len(pairs) - MOST_ANNOTATIONS
    if rest > 0:
        screen.print(f"and {plural(rest, 'more finding')}, not annotated", markup=False)


def annotation(report: VerifyReport, finding: Finding) -> str:
    """Return the workflow command of a finding, which its text cannot break out of."""
    path = report.path
    file = str(path / finding.file if finding.file and path.is_dir() else path)
    if Path(file).is_relative_to(Path.cwd()):
        file = str(Path(file).relative_to(Path.cwd()))  # GitHub marks the checkout's files by these
    fields = {"file": file, "title": f"ckptool {finding.code}"}
    properties = ",".join(f"{key}={_property(value)}" for key, value in fields.items())
    return f"::{_LEVELS[finding.severity]} {properties}::{_data(visible(finding.message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(visible(text)).replace(":", "%3A").replace(",", "%2C")
