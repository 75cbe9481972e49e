"""What commands show is what ``golden/`` keeps: stdout, then stderr, then the exit code.

``pytest tests/screens --rewrite-screens`` writes what they show now.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Ended, run_command
from scenes import prepare
from screen_table import SCREENS, Screen

from ckptool.version import __version__

GOLDEN = Path(__file__).parent / "golden"
FREE = SimpleNamespace(free=1 << 40)
"""What every disk has left: its size takes part in where lines are wrapped."""
VARIABLE = (
    (re.compile(re.escape(__version__)), "VERSION"),
    (re.compile(r" +$", re.M), ""),  # of help, up to the terminal's edge
)
"""What differs between machines or releases, and the words in its place."""


@contextmanager
def a_machine(width: int | None) -> Iterator[None]:
    """Have the name, terminal, disk, time zone and variables that screens are made for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "WORLD_SIZE", "RANK"):
            patch.delenv(name, raising=False)
        environment = {"COLUMNS": str(width or 80), "LINES": "50", "TERM": "dumb", "TZ": "UTC"}
        for name, value in {**environment, "CKPTOOL_NO_PROGRESS": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(sys.modules["__main__"], "__package__", None)  # else usage speaks of pytest
        patch.setattr(shutil, "disk_usage", lambda path: FREE)
        time.tzset()
        yield
    time.tzset()


def shown(screen: Screen, folder: Path) -> str:
    """Run the commands of a screen in a folder, and return the lines that golden files keep."""
    prepare(folder, screen.commands)
    lines = []
    with a_machine(screen.width):
        for command in screen.commands:
            words, terminal = shlex.split(command), screen.width is not None
            ended = run_command(*words, cwd=folder, terminal=terminal)
            lines += [f"$ ckptool {command}", *lines_of(ended), ""]
    text = "\n".join(lines)
    for pattern, word in VARIABLE:
        text = pattern.sub(word, text)
    return text


def lines_of(ended: Ended) -> list[str]:
    """Return what a command said, and how it ended."""
    errors = [f"[stderr]\n{ended.stderr.rstrip()}"] if ended.stderr else []
    output = [ended.stdout.rstrip()] if ended.stdout.strip() else []
    return [*output, *errors, f"[exit {ended.code}]"]


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = shown(SCREENS[name], tmp_path)
    golden = GOLDEN / f"{name}.txt"
    if request.config.getoption("rewrite_screens"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_every_golden_file_is_of_a_screen(request: pytest.FixtureRequest) -> None:
    """A rewriting removes the others."""
    others = [path for path in GOLDEN.iterdir() if path.stem not in SCREENS]
    if request.config.getoption("rewrite_screens"):
        for path in others:
            path.unlink()
        return
    assert others == []
