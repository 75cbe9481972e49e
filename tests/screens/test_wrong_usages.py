"""What a hundred wrong usages are answered with, in one file to read: ``wrong_usages.txt``.

Each answer says what is wrong (the file, the tensor, the numbers), why, and the next command that
works. ``pytest tests/screens --rewrite-screens`` writes what they say now.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from conftest import Ended, run_command
from scenes import prepare
from test_screens import a_machine, lines_of
from wrong_usages import FILES, WRONG_USAGES

GOLDEN = Path(__file__).with_name("wrong_usages.txt")
COMMANDS = [command for commands in WRONG_USAGES.values() for command in commands]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name."""
    folder = tmp_path_factory.mktemp("place")
    prepare(folder, COMMANDS)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "latest").symlink_to("run/step-700")
    return folder


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, Ended]:
    """How each command ends."""
    before = contents(place)
    with a_machine(80):
        ended = {c: run_command(*shlex.split(c), cwd=place, terminal=True) for c in COMMANDS}
    assert contents(place) == before
    return ended


def contents(folder: Path) -> dict[str, int]:
    """The files below a folder, with their sizes."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def test_wrong_usages(answers: dict[str, Ended], request: pytest.FixtureRequest) -> None:
    lines = []
    for kind, commands in WRONG_USAGES.items():
        lines += [f"## {kind}", ""]
        for command in commands:
            lines += [f"$ ckptool {command}", *lines_of(answers[command]), ""]
    found = "\n".join(lines)
    if request.config.getoption("rewrite_screens"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_usage_is_answered_with_an_error_and_what_works(
    command: str, answers: dict[str, Ended]
) -> None:
    done = answers[command]
    assert done.code in (2, 3, 4, 5)
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
    assert done.stdout == ""


def test_there_are_at_least_a_hundred() -> None:
    assert len(set(COMMANDS)) == len(COMMANDS) >= 100
