"""The process itself: how it ends where nobody reads what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.cli import _writes_to_sockets

FIXTURES = Path(__file__).parent.parent / "fixtures"


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
    line = [sys.executable, "-m", "ckptool", "inspect", str(FIXTURES / "dcp_base" / "ckpt"), said]
    environment = {**os.environ, "WORLD_SIZE": "1"}
    with os.fdopen(writes) as nobody:
        done = subprocess.run(line, stdout=nobody, stderr=nobody, env=environment, check=False)
    assert done.returncode == 141
