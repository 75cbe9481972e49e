"""Damaged checkpoints, and what is left of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from recipes.damage import DAMAGE

from ckptool.commands.options.verify import SalvageOptions
from ckptool.commands.verify.salvage.salvage import SalvageReport, plan_salvage


def salvage(source: Path, target: Path) -> SalvageReport:
    return plan_salvage(source, target, SalvageOptions()).run()


def damaged_copy(name: str, copy_of: Callable[[str], Path]) -> Path:
    folder = copy_of(DAMAGE[name].source)
    DAMAGE[name].apply(folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
