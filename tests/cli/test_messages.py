"""What is said of wrong words, of damage and of nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptool.cli.app import SUMMARIES, app, load_command
from ckptool.cli.parameters import parse_place
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.declaration import parse_dims
from ckptool.errors import CkptoolError, Damaged, NotFound, UsageError, damaged
from ckptool.render.messages import show_error

DCP = Path(__file__).parents[2] / "fixtures" / "dcp_base" / "ckpt"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("inspect", "nowhere"), 3, "nowhere: no such file or folder"),
        (("inspect", "--bogus"), 2, "No such option: --bogus"),
        (("inspect", str(DCP), "--shards", "q"), 2, "--shards 'q' matches no tensors"),
    ],
)
def test_an_error_is_an_answer_with_json(words: tuple[str, ...], code: int, message: str) -> None:
    line = [sys.executable, "-m", "ckptool", *words, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == code
    assert told["schema"] == "ckptool.error/2"
    assert told["message"].startswith(message)
    assert message in done.stderr
    assert [one["code"] for one in told["problems"]] == [None]


@pytest.mark.parametrize(
    ("words", "renamed"),
    [
        (["inspect", "--map", "w"], "--shards"),
        (["inspect", "--ranks"], "--rank-bytes"),
        (["convert", "a", "b", "--one-rank"], "--single-rank"),
        (["reshard", "--unstack"], "--split-stacked"),
        (["verify", "--finite"], "--fail-nonfinite"),
        (["verify", "--against-from", "dcp"], "--other-format"),
    ],
)
def test_a_former_name_is_answered_with_the_new_one(words: list[str], renamed: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"Did you mean {renamed}?" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["convert", DCP, "out", "--to", "safetensor"], "did you mean safetensors?"),
        (["convert", DCP, "out.pt", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["reshard", DCP, "out", "--mesh", "2", "--to", "dpc"], "did you mean dcp?"),
        (["reshard", DCP, "out", "--mesh", "2", "--policy", "fspd"], "did you mean fsdp?"),
        (["verify", DCP, "--format", "juint"], "did you mean junit?"),
        (["verify", DCP, "--from", "torch-svae"], "did you mean torch-save?"),
        (["verify", DCP, "--ignore", "crc-mismach"], "did you mean crc-mismatch?"),
        (["bench", "--strategies", "torch-svae"], "did you mean torch-save?"),
        (["maps", "meta-lama"], "did you mean meta-llama?"),
        (["inspect", DCP, "--shards", "plian"], "did you mean plain?"),
        (["inspect", DCP, "--stats", "plian"], "did you mean plain?"),
        (["extract", DCP, "plian"], "did you mean plain?"),
        (["verify", DCP, "--format", "42"], "one of text, json, junit, github"),
    ],
)
def test_every_misspelled_word_is_answered_alike(words: list[object], hint: str) -> None:
    error = CliRunner().invoke(app, list(map(str, words))).exception
    assert isinstance(error, UsageError)
    assert error.hint == hint


def test_damage_without_a_hint_of_its_own_has_that_of_its_code(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(b"\x10" + bytes(7) + b'{"w":')
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", "inspect", str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    hint = "use another copy of the file, or the previous checkpoint"
    assert (done.returncode, json.loads(done.stdout)["hint"]) == (3, hint), done.stderr
    assert done.stderr.splitlines()[-1] == f"hint: {hint}"


def test_an_option_without_its_word_is_not_suggested_for_itself() -> None:
    said = CliRunner().invoke(app, ["inspect", str(DCP), "--html"]).output
    assert "requires an argument" in said
    assert "Did you mean" not in said


def test_a_word_that_is_neither_a_command_nor_a_file() -> None:
    done = CliRunner().invoke(app, ["elsewhere"])
    assert done.exit_code == 2
    assert "No such command, file or folder: 'elsewhere'." in done.output


def test_a_screen_is_exported_as_a_picture_and_a_page_has_its_own_option(tmp_path: Path) -> None:
    page = tmp_path / "screen.html"
    error = CliRunner().invoke(app, ["inspect", str(DCP), "--export", str(page)]).exception
    assert isinstance(error, UsageError)
    assert error.hint == f"--html {page} writes a page"
    assert not page.exists()


@pytest.mark.parametrize("words", [["verify", "--ranks"], ["formats", "--map"]])
def test_no_option_of_another_command_is_suggested(words: list[str]) -> None:
    assert "Did you mean" not in CliRunner().invoke(app, words).output


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_list_of_commands_says_what_each_says_of_itself(command: str) -> None:
    text = load_command(command).help or ""
    assert " ".join(text.partition("\n\n")[0].split()) == SUMMARIES[command]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Damaged("a\nb\x1b[31m: [bold]"), "error: a\\nb\\x1b[31m: [bold]\n"),
        (damaged(["a", "b"], subject="w"), "error: 2 problems in w:\n  - a\n  - b\n"),
        (damaged(["a", "a"], subject="w", hint="c"), "error: a\nhint: c\n"),
    ],
)
def test_an_error_on_the_screen(
    error: CkptoolError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_error(error)
    assert capsys.readouterr().err == said


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(UsageError, match="SRC: empty path"):
        parse_place("", "SRC")


def test_a_link_to_nothing_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-9")
    with pytest.raises(NotFound, match="latest: link to step-9: no such file"):
        open_checkpoint(tmp_path / "latest")


def test_dims_said_twice_must_agree() -> None:
    assert parse_dims(["a=2", "b = 0", "a=2"]) == {"a": 2, "b": 0}
    with pytest.raises(UsageError, match="--dim a: conflicting sizes 2 and 3"):
        parse_dims(["a=2", "a=3"])
