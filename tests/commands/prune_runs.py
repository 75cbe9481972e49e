"""Runs that tests prune, and what is left of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.commands.runs.prune.prune import PruneReport
from ckptool.engine.write import removal
from ckptool.storage.url import Location


def damage(step: Path) -> None:
    file = next(step.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


def fates(report: PruneReport) -> dict[str, str]:
    return {step.path.name: step.fate for step in report.steps}


def pruned(run: Path, keep_last: int = 1, **options: Any) -> PruneReport:
    return ckptool.prune(run, keep_last=keep_last, **options)


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def hashes(step: Path) -> dict[str, str]:
    files = sorted(path for path in step.rglob("*") if path.is_file())
    return {str(p.relative_to(step)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def after_each_removal(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have another process do something after each step that prune removes."""
    real = removal.remove

    def remove(path: Location, side: Location | None) -> None:
        real(path, side)
        act()

    monkeypatch.setattr("ckptool.commands.runs.prune.prune.remove", remove)
