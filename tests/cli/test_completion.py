"""Examples and groups of commands in the help, nearest options, and what a shell completes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_command
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ckptool.cli import completion
from ckptool.cli.app import SUMMARIES, app, load_command
from ckptool.cli.examples import EXAMPLES, GROUPS
from ckptool.commands.keymap.library import builtin_maps
from ckptool.commands.verify.codes import CODES
from ckptool.core.dtype import parse_dtype
from ckptool.core.sharding.placement import POLICIES
from ckptool.formats import FORMATS, targets

READABLE = {name for name, row in FORMATS.items() if row.reading.is_possible}


def complete(line: str) -> list[str]:
    """What bash is told of the last word of a line."""
    words = {"_CKPTOOL_COMPLETE": "complete_bash", "COMP_WORDS": line}
    count = {"COMP_CWORD": str(len(line.split(" ")) - 1)}
    return CliRunner().invoke(app, [], prog_name="ckptool", env=words | count).stdout.split()


def test_every_command_is_in_one_group_and_has_examples() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SUMMARIES)
    assert EXAMPLES.keys() == SUMMARIES.keys()
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    order = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert order == sorted(order)


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_help_of_a_command_ends_with_its_examples(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    examples = [f"$ {example}" for example in EXAMPLES[command]]
    assert lines[-len(examples) - 1 :] == ["Examples:", *examples]
    assert all("ckptool " in example for example in examples)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["inspect", "--tensor", "x"], "--tensors"),
        (["convert", "a", "b", "--model_only"], "--model-only"),
        (["verify", "--stric"], "--strict"),
        (["inspect", "--map", "w"], "--shards"),
    ],
)
def test_a_misspelled_option_is_answered_with_the_nearest(words: list[str], flag: str) -> None:
    done = run_command(*words)
    assert done.code == 2
    assert done.stderr.endswith(f"hint: did you mean {flag}?\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckptool convert a b --to ", {*targets()}),
        ("ckptool reshard a b --to ", {*targets(mesh=True)}),
        (
            "ckptool inspect a --from ",
            READABLE,
        ),
        ("ckptool convert a b --map ", {"auto", *builtin_maps()}),
        ("ckptool maps ", {*builtin_maps()}),
        ("ckptool reshard a b --policy ", {*POLICIES}),
        ("ckptool reshard a b --rank-state d", {"drop", "drop-rng"}),
        ("ckptool verify a --ignore tensor-", {c for c in CODES if c.startswith("tensor-")}),
        ("ckptool inspect a --sort ", {"name", "size"}),
        ("ckptool help reci", {"recipes"}),
        ("ckptool ins", {"inspect"}),
    ],
)
def test_what_bash_completes(line: str, expected: set[str]) -> None:
    assert set(complete(line)) == expected


def test_zsh_is_answered_by_the_script_that_it_loads_at_the_first_tab(tmp_path: Path) -> None:
    place = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    command = [str(Path(sys.executable).with_name("ckptool")), "--install-completion", "zsh"]
    subprocess.run(command, env=os.environ | place, check=True, capture_output=True)
    script = (tmp_path / ".zfunc" / "_ckptool").read_text()
    answers = 'if [[ $funcstack[1] == _ckptool ]]; then _ckptool_completion "$@"; else'
    assert script.splitlines()[-1] == f"{answers} compdef _ckptool_completion ckptool; fi"


@pytest.mark.parametrize(("command", "mesh"), [("convert", False), ("reshard", True)])
def test_the_help_names_every_format_that_is_written(command: str, mesh: bool) -> None:
    (to,) = (option for option in load_command(command).params if "--to" in option.opts)
    said = re.split(r"[ ,:;().]+", to.help)
    assert not targets(mesh=mesh).keys() - {*said}


def test_types_that_are_completed_are_types() -> None:
    words = complete("ckptool convert a b --dtype ")
    assert {"bf16", "fp32", "float8_e4m3fn"} <= {*words}
    assert all(parse_dtype(word) for word in words)


def test_what_follows_a_glob_or_a_comma_is_completed() -> None:
    named = {option.name: option for option in load_command("convert").params}
    context: Any = type("Context", (), {"params": {}})()
    found = named["dtype"].shell_complete(context, "*.w=bf")
    assert [item.value for item in found] == ["*.w=bf16", "*.w=bfloat16"]


def test_names_of_tensors_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({n: np.ones(1, "f4") for n in ("a.w", "a.b", "c")}, "m.safetensors")
    for head in (
        "inspect m.safetensors --tensors",
        "extract m.safetensors c",
        "m.safetensors --stats",
    ):
        assert complete(f"ckptool {head} a.") == ["a.b", "a.w"]
    assert complete("ckptool inspect missing.pt --shards a.") == []
    assert complete("ckptool inspect s3://bucket/x --shards a.") == []
    assert complete("ckptool inspect --tensors ") == ["a.b", "a.w", "c"]


def test_nobody_waits_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_PATIENCE", 0.01)
    monkeypatch.setattr(completion, "_names_in", lambda source: signal.pause())
    assert complete("ckptool inspect m --tensors a") == []
