"""The process itself: what it says of an error, and how it ends where nobody reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.cli import _writes_to_sockets
from ckptool.cli.places import parse_place
from ckptool.commands.open import open_checkpoint
from ckptool.core.amounts import parse_dims
from ckptool.errors import CkptoolError, Damaged, NotFound, UsageError, damaged
from ckptool.render.messages import show_error

DCP = Path(__file__).parent.parent / "fixtures" / "dcp_base" / "ckpt"


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["inspect", "runs/1"], {}, False),
        (["inspect", "s3://bucket/1"], {}, True),
        (["reshard", "runs/1", "--mesh", "2"], {"WORLD_SIZE": "2"}, True),
    ],
)
def test_sigpipe_ends_only_what_has_no_sockets(
    words: list[str], environment: dict[str, str], expected: bool
) -> None:
    assert _writes_to_sockets(words, environment) is expected


@pytest.mark.parametrize("said", ["--json", "--values", "--bogus"])
def test_nobody_reads(said: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    line = [sys.executable, "-m", "ckptool", "inspect", str(DCP), said]
    environment = {**os.environ, "WORLD_SIZE": "1"}
    with os.fdopen(writes) as nobody:
        done = subprocess.run(line, stdout=nobody, stderr=nobody, env=environment, check=False)
    assert done.returncode == 141


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("inspect", "nowhere"), 3, "nowhere: no such file or folder"),
        (("inspect", "--bogus"), 2, "No such option: --bogus"),
        (("inspect", str(DCP), "--map", "q"), 2, "--map 'q': no such tensor"),
    ],
)
def test_an_error_is_an_answer_with_json(words: tuple[str, ...], code: int, message: str) -> None:
    line = [sys.executable, "-m", "ckptool", *words, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == code
    assert told["schema"] == "ckptool.error/1"
    assert told["message"].startswith(message)
    assert message in done.stderr


# Words


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
    with pytest.raises(UsageError, match="SRC: an empty path"):
        parse_place("", "SRC")


def test_a_link_to_nothing_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-9")
    with pytest.raises(NotFound, match="latest: a link to step-9: no such file"):
        open_checkpoint(tmp_path / "latest")


def test_dims_said_twice_must_agree() -> None:
    assert parse_dims(["a=2", "b = 0", "a=2"]) == {"a": 2, "b": 0}
    with pytest.raises(UsageError, match="--dim a: both 2 and 3"):
        parse_dims(["a=2", "a=3"])
