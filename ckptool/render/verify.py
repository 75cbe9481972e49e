"""Show what verify found."""

from __future__ import annotations

from typing import Any

from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.render.text import console, escaped

_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def show_verify(report: VerifyReport) -> None:
    """Each finding with its hint, then the one sentence."""
    screen = console()
    for finding in report.findings:
        colour = _COLOURS[finding.severity.value]
        screen.print(
            f"[{colour}]{finding.severity.value}[/] {finding.code}: {escaped(finding.message)}",
            soft_wrap=True,
        )
    screen.print(escaped(report.sentence), soft_wrap=True)


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """The report as one JSON object, schema ``ckptool.verify/1``."""
    return {
        "schema": "ckptool.verify/1",
        "path": str(report.path),
        "format": report.format,
        "sound": report.sound,
        "findings": [_finding_json(finding) for finding in report.findings],
        "sentence": report.sentence,
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "file": finding.file,
        "tensor": finding.tensor,
        "message": finding.message,
        "hint": finding.hint,
    }
