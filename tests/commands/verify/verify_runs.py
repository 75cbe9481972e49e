"""Runs of verify, and what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verify import verify


def checked(path: Path, **options: Any) -> VerifyReport:
    return verify(path, VerifyOptions(workers=2, **options))


def codes(report: VerifyReport, *severities: Severity) -> set[str]:
    wanted = severities or (Severity.ERROR, Severity.WARNING)
    return {finding.code for finding in report.findings if finding.severity in wanted}


def saved(folder: Path, **files: Any) -> Path:
    torch = pytest.importorskip("torch")
    folder.mkdir()
    for name, state in files.items():
        torch.save(state, folder / f"{name}.pt")
    return folder
