"""The report of a verification, and the line that sums it up."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptool.commands.verify.codes import Severity, failing
from ckptool.commands.verify.findings import Finding
from ckptool.storage.url import Location


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify found at ``path``.

    ``depth`` says what was read (``full``, ``quick``, ``sample``), ``nbytes`` how many bytes of
    data. ``summary`` sums it up; ``ok`` decides the exit code.
    """

    path: Location
    format: str | None
    findings: tuple[Finding, ...]
    ok: bool
    summary: str
    depth: str = "full"
    nbytes: int = field(default=0, metadata={"key": "bytes_read"})
    files: int = 0
    tensors: int = 0

    def of(self, severity: Severity) -> list[Finding]:
        """Return the findings of one severity."""
        return [finding for finding in self.findings if finding.severity is severity]

    def fails(self, strict: bool) -> list[Finding]:
        """Return the findings that make the checkpoint fail."""
        return [finding for finding in self.findings if finding.severity in failing(strict)]


_READ = {"full": "all data read and checked", "quick": "metadata checked, data not read"}


def summarize(report: VerifyReport, sample: float, seed: int) -> str:
    """Return one line on a verification; ``sample`` is the share of data that ``seed`` chose."""
    sampled = f"a sample of {sample:.3g} of the data read and checked (seed {seed})"
    read = _READ.get(report.depth, sampled)
    counts = [
        f"{len(report.of(severity)):,} {severity.value}{'s' * (len(report.of(severity)) != 1)}"
        for severity in (Severity.ERROR, Severity.WARNING)
        if report.of(severity)
    ]
    if not report.ok:
        rest = "" if report.depth == "full" else f"; {read}"
        return f"FAILED: {', '.join(counts)}{rest}"
    unprotected = any(finding.code == "no-checksum" for finding in report.findings)
    limits = "; changed values cannot be detected in files without checksums" if unprotected else ""
    return f"OK: {read}{''.join(f', {count}' for count in counts)}{limits}"
