"""What commands say of themselves, of errors and of places that are none."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from conftest import run_command
from typer.testing import CliRunner

from ckptool.cli.app import SUMMARIES, app, load_command
from ckptool.cli.process import known_error
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options import FILE, parse_place
from ckptool.commands.options.declaration import parse_dims
from ckptool.errors import CkptoolError, Damaged, NotFound, UsageError, damaged
from ckptool.render.messages import show_error
from ckptool.storage.files import unreadable

DCP = Path(__file__).parents[2] / "fixtures" / "dcp_base" / "ckpt"


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_list_of_commands_says_what_each_says_of_itself(command: str) -> None:
    text = load_command(command).help or ""
    assert " ".join(text.partition("\n\n")[0].split()) == SUMMARIES[command]


def test_many_problems_are_counted_in_thousands() -> None:
    lines = damaged([f"x{n}" for n in range(80_000)], subject="w").message.splitlines()
    assert lines[0] == "80,000 problems in w:"
    assert lines[-1] == "  - and 79,988 more"


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


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "`ls -ld` shows who may"),
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "write elsewhere"),
    ],
)
def test_what_a_disk_refuses_has_a_next_step(number: int, hint: str) -> None:
    refused = OSError(number, os.strerror(number), "a")
    error, unread = known_error(refused), unreadable("a", refused)
    assert hint in (error.hint or "")
    assert hint in (unread.hint or "")


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(UsageError, match="SRC: empty path"):
        parse_place("", "SRC")
    with pytest.raises(UsageError, match="--hf-assets: empty path"):
        FILE.parse("", "--hf-assets")


def test_a_link_to_nothing_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-9")
    with pytest.raises(NotFound, match="latest: link to step-9: no such file"):
        open_checkpoint(tmp_path / "latest")


def test_dims_said_twice_must_agree() -> None:
    assert parse_dims(["a=2", "b = 0", "a=2"]) == {"a": 2, "b": 0}
    with pytest.raises(UsageError, match="--dim a: conflicting sizes 2 and 3"):
        parse_dims(["a=2", "a=3"])


@pytest.mark.parametrize("text", ["a", "a=", "=2", "a=-1", f"a={'9' * 5000}"])
def test_what_is_no_size_of_a_dim_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=SIZE"):
        parse_dims([text])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "a"], "missing argument DST\nhint: ckptool convert [OPTIONS] SRC DST"),
        (["convert", "a", "b", "c"], "unexpected words: c\nhint: ckptool convert [OPTIONS] SRC"),
        (["prune", "a"], "missing option --keep-last\nhint: --keep-last N: Keep the newest"),
        (["verify", "--workers", "x"], "invalid --workers 'x': not a whole number"),
        (
            ["inspekt", "a"],
            "no such command, file or folder: 'inspekt'\nhint: did you mean",
        ),
        (["--bogus"], "no such option: --bogus\nhint: `ckptool --help` lists the options"),
        (["bench", "-x"], "no such option: -x\nhint: `ckptool bench --help` lists the options"),
    ],
    ids=" ".join,
)
def test_wrong_words_are_answered_like_every_error(words: list[str], said: str) -> None:
    done = run_command(*words)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert "\nhint: " in done.stderr
    told = json.loads(run_command(*words, "--json").stdout)
    assert told["message"] in done.stderr


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ("2y4", "'2y4' is not a number of ranks"),
        ("2,4", "'2,4' is not a number of ranks"),
        ("dp=two,tp=2", "'two' is not a number of ranks"),
        ("-1", "'-1' is not a number of ranks"),
        ("2x0", "a dim has at least 1 rank"),
        ("2xx4", "a dim has no name or size"),
        ("", "a dim has no name or size"),
        ("dp=2,tp", "the dim 'tp' has no size"),
        ("dp=2,=4", "a dim has no name or size"),
        ("dp=2,dp=4", "each dim needs its own name"),
        ("2x2x2x2x2", "5 dims, more than 4"),
        ("1000x1000", "more than 131,072 ranks"),
        ("9" * 5000, "more than 131,072 ranks"),
    ],
)
def test_a_bad_mesh_says_why(mesh: str, reason: str) -> None:
    done = run_command("reshard", DCP, "out", f"--mesh={mesh}")
    assert done.code == 2
    assert f": {reason}\nhint: such as 8, 2x4 or dp=2,tp=4\n" in done.stderr


def test_an_unknown_map_is_answered_with_the_nearest_not_with_all() -> None:
    done = run_command("convert", DCP, "out", "--to", "dcp", "--map", "qwen")
    hint = done.stderr.splitlines()[1]
    assert hint.count("qwen") == 3
    assert "`ckptool maps` lists all" in hint


@pytest.mark.parametrize(
    "words",
    [
        ("verify", str(DCP), "--recipe", "s3://b/r"),
        ("inspect", str(DCP), "--export", "s3://b/r"),
        ("bench", "--compare", "s3://b/r"),
        ("reshard", str(DCP), "--plan", "s3://b/r"),
    ],
)
def test_an_option_for_a_file_takes_no_url(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == f"{words[-2]} s3://b/r: needs a local path, not a URL"
