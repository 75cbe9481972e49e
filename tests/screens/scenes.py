"""The checkpoints that the commands of a screen name, in a folder of their own."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from conftest import CASES, Case
from recipes.damage import DAMAGE

SAVED = 1_700_000_000
"""When all files were written, in seconds; each step of a run a minute after the one before."""
BY_NAME = {case.name: case for case in CASES}


def prepare(folder: Path, lines: Iterable[str]) -> None:
    """Make what the words of commands name: fixtures, damaged fixtures, and what is listed here."""
    for name in {word.split("/")[0] for line in lines for word in shlex.split(line)}:
        if name in BY_NAME:
            copy(BY_NAME[name], folder / name)
        elif name in DAMAGE:
            copy(BY_NAME[DAMAGE[name].source], folder / name)
            DAMAGE[name].apply(folder / name)
        elif name in OTHERS:
            OTHERS[name](folder / name)
    for path in folder.rglob("*"):
        os.utime(path, (SAVED, SAVED))
    for minute, step in enumerate(sorted(folder.glob("run/step-*")), 1):
        for path in step.rglob("*"):
            os.utime(path, (SAVED + 60 * minute,) * 2)


def copy(case: Case, path: Path) -> None:
    """Copy a fixture's checkpoint, which is a folder."""
    shutil.copytree(case.path, path)


def write_run(path: Path) -> None:
    """Write six steps, of which the first was never finished and the fourth has lost bytes."""
    for number in range(100, 700, 100):
        copy(BY_NAME["dcp_base"], path / f"step-{number}")
    (path / "step-100" / ".metadata").unlink()
    os.truncate(path / "step-400" / "__1_0.distcp", 100)


def write_damaged_run(path: Path) -> None:
    """Write two steps, both damaged."""
    for number in (100, 200):
        copy(BY_NAME["dcp_base"], path / f"step-{number}")
        os.truncate(path / f"step-{number}" / "__1_0.distcp", 100)


def write_text(path: Path) -> None:
    """Write a folder of notes, no checkpoint."""
    path.mkdir()
    (path / "README.txt").write_text("Checkpoints are in the other bucket.\n")


OTHERS: dict[str, Callable[[Path], None]] = {
    "run": write_run,
    "damaged_run": write_damaged_run,
    "notes": write_text,
    "empty": Path.mkdir,
}
