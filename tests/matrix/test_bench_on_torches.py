"""The benchmark's strategies with other versions of torch: each runs where the table says so."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from fork_server import FORKING, forking_python
from matrix.bench_table import CELLS, HEAD, NAMES

from ckptool.commands.bench.machine import installed_version
from ckptool.commands.bench.strategies import STRATEGIES

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
LAUNCHER = os.environ.get("CKPTOOL_TORCH_AT")
GIVEN = os.environ.get("CKPTOOL_TORCHES", "").split() if LAUNCHER else []
OWN = "its own"
VERSIONS = [OWN, *(version for version in GIVEN if version.rpartition(".")[0] in HEAD)]
SHORT = ["dcp-async-thread/async", "experimental-async"]
"""Of the torch of the tests unless others are asked for, too: those that save by its stagers."""

SETTINGS = ["--size", "1MB", "--ranks", "1", "--repeat", "1", "--quiet", "--json"]
DEPENDS_ON_THE_DISK = "torch-checkpointing/direct"


def test_the_table_has_every_strategy() -> None:
    assert list(STRATEGIES) == NAMES


def judged(row: dict[str, Any]) -> str:
    if row["consistency"]["verdict"] == "DIRTY":
        return "DIRTY"
    return "own" if "each save has its own" in (row["remark"] or "") else "clean"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_strategy_runs_where_the_table_says_so(version: str, tmp_path: Path) -> None:
    """The Python of another torch must be of this one's version: it takes its other packages."""
    asked = [name for name in (NAMES if LAUNCHER else SHORT) if name != DEPENDS_ON_THE_DISK]
    asked = [name for name in asked if installed_version(STRATEGIES[name].library)]
    words = ["-m", "ckptool", "bench", *SETTINGS, "--out", str(tmp_path)]
    command = [str(LAUNCHER), version, *words]
    if version == OWN:
        python = str(forking_python(tmp_path))  # starts the ranks, too
        command = [python, "-c", FORKING.format(python), *words[2:]]
    paths = (ROOT, os.environ.get("PYTHONPATH", ""), sysconfig.get_path("purelib"))
    ran = subprocess.run(
        [*command, "--strategies", ",".join(asked)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    torch = ".".join(told["versions"]["torch"].split(".")[:2])
    assert torch in HEAD
    assert not told["failed"]
    found = {row["name"]: judged(row) for row in told["strategies"]}
    found |= dict.fromkeys(told["skipped"], "no")
    assert found == {name: CELLS[name, torch] for name in asked}
