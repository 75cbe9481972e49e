"""Comparisons, and what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import taken
from msgspec.structs import replace

from ckptool.commands.options.question import Question
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.options.verify import CompareOptions, VerifyOptions
from ckptool.commands.verify.compare.against import AgainstReport
from ckptool.commands.verify.compare.against import against as run_against


def against(one: Path, other: Path, **options: Any) -> AgainstReport:
    verify = VerifyOptions(taken(ReadOptions, options))
    selection = taken(Selection, options)
    rewrite = replace(taken(RewriteOptions, options), selection=selection)
    comparison = CompareOptions(**options)
    return run_against(one, other, Question(check=verify, rewrite=rewrite, comparison=comparison))


def codes(report: AgainstReport) -> set[str]:
    return {finding.code for finding in report.verify.findings}


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "wide": torch.randn(300, 2000),
        "half": torch.randn(7, 5, dtype=torch.bfloat16),
        "nan": torch.tensor([float("nan"), 0.0, 1.0]),
        "count": torch.arange(6).reshape(2, 3),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
    }
