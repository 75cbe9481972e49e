"""Progress in a log: a line now and then, with the rate and the time left."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from conftest import case
from rich.console import Console
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.core.text import duration
from ckptool.engine.progress import Progress
from ckptool.render import progress as progress_module
from ckptool.render.progress import INTERVAL, Log

GIB = 1 << 30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which a test changes."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_line_comes_ten_seconds_after_the_last_one(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    log = Log(progress)
    progress.begin(40 * GIB)
    for _ in range(400):
        clock[0] += 0.1
        progress.add(GIB // 10)
        log.look()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "25% of 40.0 GiB, 1.00 GiB/s, 30 s left"
    assert 3 <= len(lines) <= 40 / INTERVAL


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (200, "3 min 20 s"),
        (1800, "30 min"),
        (7200, "2 h"),
        (7500, "2 h 5 min"),
    ],
)
def test_times_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come at once, and the environment is as it was afterwards."""
    monkeypatch.setattr(progress_module, "INTERVAL", 0.0)
    for name in ("NO_COLOR", "FORCE_COLOR", "CKPTOOL_NO_PROGRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


LINE = re.compile(r"^\d+% of .+/s, .+ left$", re.M)
COMMANDS = {
    "convert": ("convert", "SRC", "OUT", "--to", "dcp"),
    "verify": ("verify", "SRC"),
    "against": ("verify", "SRC", "--against", "SRC"),
    "stats": ("inspect", "SRC", "--stats", "*"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("no_wait")
def test_a_log_has_lines_unless_they_are_not_wanted(name: str, tmp_path: Path) -> None:
    def errors(out: str, *more: str) -> str:
        places = {"SRC": str(case("dcp_base").path), "OUT": str(tmp_path / out)}
        words = [places.get(word, word) for word in COMMANDS[name]]
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        return done.stderr

    assert LINE.search(errors("one"))
    assert not LINE.search(errors("two", "--no-progress"))


def test_the_first_frame_of_the_bar_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr("ckptool.render.text.console", lambda **_: terminal)
    progress = Progress()
    progress.begin(100 << 20)
    progress.add(25 << 20)
    bar = progress_module._Bar(progress)
    bar.look()
    bar.close()
    assert "25.0/100.0 MiB" in screen.getvalue()
    assert "\x1b[32m0.0/" not in screen.getvalue()


@pytest.mark.usefixtures("no_wait")
def test_colors_are_as_asked() -> None:
    path = str(case("dcp_base").path)
    shown = {
        when: CliRunner().invoke(app, ["inspect", path, "--color", when]).stdout
        for when in ("never", "always", "auto")
    }
    assert "\x1b[" in shown["always"]
    assert "\x1b[" not in shown["never"]
    done = CliRunner().invoke(app, ["inspect", path, "--color", "blue"])
    assert "invalid --color" in str(done.exception)
