"""What verify finds: stable codes, severities, and the report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptool.engine.remote_path import Location


class Severity(Enum):
    """``error``: not sound. ``warning``: fails with --strict. ``info``: for people to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


def failing(strict: bool) -> frozenset[Severity]:
    """The severities that make a checkpoint unsound."""
    return frozenset([Severity.ERROR, Severity.WARNING] if strict else [Severity.ERROR])


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that verify found.

    ``code`` is stable, in kebab-case; ``file`` is relative to the checkpoint's root; ``message``
    says the thing, the problem and the numbers, ``hint`` the next step.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify found at ``path``.

    ``depth`` says what was read (``content``, ``quick``, ``sample``), ``nbytes`` how many bytes of
    data. ``sentence`` ends the report; ``sound`` decides the exit code.
    """

    path: Location
    format: str | None
    findings: tuple[Finding, ...]
    sound: bool
    sentence: str
    depth: str = "content"
    nbytes: int = 0
    files: int = 0
    tensors: int = 0

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity is severity]

    def fails(self, strict: bool) -> list[Finding]:
        """The findings that make it unsound."""
        return [finding for finding in self.findings if finding.severity in failing(strict)]
