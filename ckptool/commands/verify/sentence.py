"""The one sentence that ends a report."""

from __future__ import annotations

from ckptool.commands.verify.findings import Severity, VerifyReport

_READ = {
    "content": "every byte of its data was read",
    "quick": "its metadata was read, not its data",
}


def sentence(report: VerifyReport, sample: float, seed: int) -> str:
    """What a verification comes to; ``sample`` is the share of the data that ``seed`` chose."""
    sampled = f"a sample of {sample:.3g} of its data was read (seed {seed})"
    read = _READ.get(report.depth, sampled)
    counts = [
        f"{len(report.of(severity)):,} {severity.value}{'s' * (len(report.of(severity)) != 1)}"
        for severity in (Severity.ERROR, Severity.WARNING)
        if report.of(severity)
    ]
    if not report.sound:
        rest = "" if report.depth == "content" else f"; {read}"
        return f"Not sound: {' and '.join(counts)}{rest}."
    unprotected = any(finding.code == "no-checksum" for finding in report.findings)
    extent = " as far as files without checksums can show" if unprotected else ""
    return f"Sound{extent}{', with ' + counts[0] if counts else ''}: {read}."
