"""``ckptool help``: the pages of the documentation without a browser."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptool.cli.app import SUMMARIES, app, load_command
from ckptool.commands.options.declaration import RARE, SPEED
from ckptool.render.help import first_sentence

DOCS = Path(__file__).parents[2] / "ckptool" / "docs"
WITH_RARE = ("inspect", "diff", "extract", "convert", "reshard", "merge", "verify", "prune")
PAGES = {path.stem: path.read_text() for path in DOCS.glob("*.md")}


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["help", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def on_terminal(*words: str, **changes: str) -> str:
    """What a terminal of 80 x 24 shows of the command; a pager marks each line it is given."""
    plain = {n: v for n, v in os.environ.items() if n not in ("NO_COLOR", "FORCE_COLOR", "PAGER")}
    size = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environment = plain | size | {"PAGER": "sed s/^/paged:/"} | changes
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "ckptool", "help", *words]
    with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as job:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 1 << 16):
                shown += block
        except OSError:  # Linux says so where the other end of a terminal is closed
            pass
    os.close(ours)
    assert job.returncode == 0, shown
    return shown.decode().replace("\r\n", "\n")


def test_the_list_has_every_page_and_every_command() -> None:
    lines = dict(re.findall(r"^  (\S+) {2,}(.+?) *$", run(), re.M))
    assert lines.pop("topic") == lines.pop("command") == "description"
    assert lines.keys() == PAGES.keys() | SUMMARIES.keys()
    assert lines["stores"].startswith("Every command takes URLs wherever it takes a path")
    assert lines["inspect"] == SUMMARIES["inspect"]


@pytest.mark.parametrize("topic", PAGES)
def test_the_list_says_of_a_page_more_than_its_name(topic: str) -> None:
    sentence = first_sentence(PAGES[topic])
    assert sentence.endswith(".")
    assert " " in sentence


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("# A\n\nUse `b.c` of\n**d**: now. And e.\n", "Use b.c of d: now."),
        ("# A\n\nTwo words.\n\nMore.\n", "Two words."),
        ("# A title\n\n```python\ncode\n```\n", "A title"),
        ("# A title\n\n| a | b |\n", "A title"),
        ("# A title\n", "A title"),
    ],
)
def test_the_first_sentence(page: str, sentence: str) -> None:
    assert first_sentence(page) == sentence


@pytest.mark.parametrize("topic", PAGES)
def test_a_page_in_a_pipe_is_its_text(topic: str) -> None:
    assert run(topic) == PAGES[topic]


def test_a_pipe_has_no_pager_no_color_and_no_note() -> None:
    line = [sys.executable, "-m", "ckptool", "help", "verify"]
    environment = os.environ | {"PAGER": "echo paged", "FORCE_COLOR": "1", "LINES": "5"}
    done = subprocess.run(line, capture_output=True, env=environment, check=True)
    assert done.stdout == (DOCS / "verify.md").read_bytes()
    assert done.stderr == b""


@pytest.mark.parametrize("command", sorted(SUMMARIES.keys() - PAGES.keys()))
def test_a_command_is_its_own_help(command: str) -> None:
    assert run(command) == CliRunner().invoke(app, [command, "--help"]).stdout


# On a terminal


def test_a_page_longer_than_the_terminal_is_paged() -> None:
    shown = on_terminal("stores")
    assert shown.startswith("paged:")
    assert "\x1b[" in shown
    assert "# Stores" not in shown


@pytest.mark.parametrize("changes", [{"LINES": "500"}, {"PAGER": "cat"}, {"PAGER": ""}])
def test_a_page_is_shown_at_once(changes: dict[str, str]) -> None:
    shown = on_terminal("stores", **changes)
    assert "Every command takes URLs" in re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "paged:" not in shown


def test_a_pager_that_cannot_run_loses_nothing() -> None:
    shown = on_terminal("stores", PAGER="no-such-pager --fast")
    assert "no-such-pager" in shown
    assert "Every command takes URLs" in re.sub(r"\x1b\[[\d;]*m", "", shown)


def test_a_pager_left_before_the_end_is_not_a_failure() -> None:
    code = (
        "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "from ckptool.render.help import _page; print(_page('more than a pipe holds' * 100_000))"
    )
    line = [sys.executable, "-c", code]
    environment = os.environ | {"PAGER": "true"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_no_color_where_none_is_wanted() -> None:
    color = re.compile(r"\x1b\[(?:\d+;)*[349]\d[;m]")
    assert color.search(on_terminal("stores"))
    assert not color.search(on_terminal("stores", NO_COLOR="1"))


def test_a_page_named_after_a_command_says_where_its_options_are() -> None:
    assert "ckptool verify --help" in on_terminal("verify").splitlines()[-1]
    assert "--help" not in on_terminal("stores")


def panels(text: str) -> dict[str, list[str]]:
    """The flags by the panels of a help, in their order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.match("╭─ (.+?) ─", line):
            found[title[1]] = []
        elif flag := re.match("│ (--[a-z-]+)", line):
            found[title_of(found)].append(flag[1])
    return found


def title_of(found: dict[str, list[str]]) -> str:
    return next(reversed(found))


RARELY = set(
    "--tp-rule --flat-params --world-size --storage-option --split-stacked --per-rank --inverse"
    " --seed --fsync --part --finish --budget".split()
)


@pytest.mark.parametrize("command", WITH_RARE)
def test_what_is_rarely_needed_comes_last_and_only_on_request(command: str) -> None:
    short, whole = (
        panels(CliRunner().invoke(app, [command, flag], env={"COLUMNS": "100"}).stdout)
        for flag in ("--help", "--help-all")
    )
    rare = whole.pop(RARE)
    assert short == whole
    assert next(reversed(short)) == SPEED
    assert not RARELY & {flag for flags in short.values() for flag in flags}
    assert {*rare} >= RARELY & {*flags_of(command)}


def flags_of(command: str) -> list[str]:
    return [flag for each in load_command(command).params for flag in each.opts]


@pytest.mark.parametrize("command", SUMMARIES)
def test_help_shows_every_word_and_wraps_by_the_terminal(command: str) -> None:
    """Rich takes what is in brackets for its markup; docstrings are wrapped for source code."""
    wide = {"COLUMNS": "2000"}
    flag = "--help-all" if command in WITH_RARE else "--help"
    shown = CliRunner(env=wide).invoke(app, [command, flag]).stdout
    texts = [option.help for option in load_command(command).params]
    assert [text for text in texts if text not in shown] == []
    paragraphs = cleandoc(load_command(command).help).split("\n\n")
    assert [text for text in paragraphs if f"\n {text} " not in shown] == []


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["nan"], [("recipes", "Which rank holds this tensor? Where is a NaN?")]),
        (["latest", "good"], [("options", "verify"), ("verify", "Find the newest good step")]),
        (["manifest"], [("verify", "Manifests"), ("options", "verify")]),
        (["torchrun"], [("options", "reshard"), ("reshard", "Many machines")]),
    ],
)
def test_a_word_is_found_in_the_pages(words: list[str], places: list[tuple[str, str]]) -> None:
    shown = run(*words)
    found = re.findall(r"^(\S+)  (.+?) *$", shown, re.M)
    assert set(places) <= set(found)
    assert shown.rstrip().endswith("ckptool help TOPIC shows a page")


def test_a_section_is_shown_with_the_sentence_that_has_the_word() -> None:
    lines = [line.strip() for line in run("infinite").splitlines()]
    assert "--fail-nonfinite  Report NaN and infinite values as errors." in lines
    assert (
        "Its model, masters and optimizer have no NaN or infinite values, unless"
        " --allow-nonfinite accepts them." in lines
    )
