"""A run of several steps."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import case

SOURCE = case("dcp_base").path


def run_of(folder: Path, *numbers: int, name: str = "step-{}") -> Path:
    run = folder / "run"
    for number in numbers:
        shutil.copytree(SOURCE, run / name.format(number))
    return run
