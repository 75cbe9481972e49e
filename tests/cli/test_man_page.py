"""The man page says what the commands say of themselves.

``python tests/cli/test_man_page.py`` writes it, ``ckptool/docs/ckptool.1``; a wheel installs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

from ckptool.cli.app import SUMMARIES, load_command
from ckptool.cli.examples import ABOUT, EXAMPLES
from ckptool.commands.options.declaration import RARE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ckptool" / "docs" / "ckptool.1"


def man_page() -> Iterator[str]:
    """The lines of the page, in the language of man."""
    yield from ('.TH CKPTOOL 1 "" ckptool "User Commands"', ".nh", ".ad l", ".SH NAME")
    yield written("ckptool - see, verify, convert and reshard distributed PyTorch checkpoints")
    yield from (".SH SYNOPSIS", r"\fBckptool\fR \fICOMMAND\fR [\fIOPTIONS\fR] ...", ".br")
    yield r"\fBckptool\fR \fIPATH\fR"
    yield from (".SH DESCRIPTION", written(ABOUT), ".SH COMMANDS")
    for name in SUMMARIES:
        yield from section(name, load_command(name))
    yield ".SH EXIT STATUS"
    for code, meaning in re.findall(
        r"^\| ([\d, ]+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.M
    ):
        yield from (".TP", code, written(meaning))
    yield from (".SH SEE ALSO", written("`ckptool help` lists the pages of the documentation."))


def section(name: str, command: Any) -> Iterator[str]:
    """What a command does, its options, and examples."""
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    options = [each for each in command.params if each.opts[0].startswith("-")]
    rare = [each for each in options if each.rich_help_panel == RARE]
    words = [
        each.metavar if each.required or each.metavar[0] == "[" else f"[{each.metavar}]"
        for each in arguments
    ]
    usage = " ".join(["ckptool", name, "[OPTIONS]", *words])
    yield f'.SS "{usage}"'
    for paragraph in cleandoc(command.help).split("\n\n"):
        yield from (".PP", written(" ".join(paragraph.split())))
    for each in [*arguments, *(one for one in options if one not in rare)]:
        yield from entry(each)
    if rare:
        yield from (".PP", "Rarely needed:")
        for each in rare:
            yield from entry(each)
    yield from (".PP", "Examples:", ".nf")
    yield from (f"    {written(example)}" for example in EXAMPLES[name])
    yield ".fi"


def entry(parameter: Any) -> Iterator[str]:
    """An option or argument, and what it means."""
    if not parameter.opts[0].startswith("-"):
        flags = rf"\fI{written(parameter.metavar)}\fR"
    else:
        words = (*parameter.opts, *parameter.secondary_opts)
        flags = ", ".join(rf"\fB{written(word)}\fR" for word in words)
        flags += rf" \fI{written(parameter.metavar)}\fR" if parameter.metavar else ""
    yield from (".TP", flags, written(" ".join(parameter.help.split())))


def written(text: str) -> str:
    """Escape what man would take for its own; what is in backticks is bold."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", text)
    return rf"\&{text}" if text[:1] in (".", "'") else text


def test_the_man_page_is_that_of_the_commands() -> None:
    assert PAGE.read_text().splitlines() == list(man_page())


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff")
def test_the_man_page_is_set_without_a_warning() -> None:
    """Each command and option is in it."""
    line = ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=10000n", str(PAGE)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    shown = done.stdout.replace("\u2010", "-").replace("\u2212", "-")
    for name in SUMMARIES:
        assert f"ckptool {name} [OPTIONS]" in shown
        assert all(
            option.opts[0] in shown for option in load_command(name).params if "-" in option.opts[0]
        )
    assert r"'^module\.='" in shown


if __name__ == "__main__":
    PAGE.write_text("\n".join(man_page()) + "\n")
