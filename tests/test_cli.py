"""The process itself: what it says of an error, and how it ends where nobody reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.cli import _writes_to_sockets

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
