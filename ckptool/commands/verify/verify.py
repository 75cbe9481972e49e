"""Whether a checkpoint is whole, unchanged and safe, from its own files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.verify.findings import Finding, Severity, VerifyReport
from ckptool.core.catalog import coverage_problem
from ckptool.errors import Damaged, Hostile


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """``strict`` makes warnings failures, ``ignore`` are codes that are left out."""

    format_name: str | None = None
    strict: bool = False
    ignore: tuple[str, ...] = ()


def verify(path: Path, options: VerifyOptions) -> VerifyReport:
    """Check the checkpoint at ``path``; all findings are collected.

    Raises NotFound and Unrecognised where there is no checkpoint, UsageError for an unknown code.
    """
    try:
        opened = open_checkpoint(path, format_name=options.format_name)
    except (Damaged, Hostile) as error:
        finding = Finding("damaged", Severity.ERROR, error.message, hint=error.hint)
        return _report(path, None, [finding], options)
    return _report(opened.path, opened.format.name, _structure(opened), options)


def _structure(opened: Opened) -> list[Finding]:
    catalog = opened.catalog
    gaps = (coverage_problem(entry) for entry in catalog.tensors.values())
    problems = [*catalog.conflicts.values(), *(gap for gap in gaps if gap is not None)]
    return [Finding("damaged", Severity.ERROR, problem) for problem in problems]


def _report(
    path: Path, format_name: str | None, found: list[Finding], options: VerifyOptions
) -> VerifyReport:
    kept = tuple(finding for finding in found if finding.code not in options.ignore)
    failing = (Severity.ERROR, Severity.WARNING) if options.strict else (Severity.ERROR,)
    failures = sum(finding.severity in failing for finding in kept)
    sentence = f"Not sound: {failures:,} problems." if failures else "Sound."
    return VerifyReport(path, format_name, kept, not failures, sentence)
