"""``python -OO``, which strips docstrings: every command and its help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import case

PROGRAM = """
import sys
from ckptool.cli import _run
from ckptool.cli.app import SUMMARIES

run, model = sys.argv[1:]
step = f"{run}/step-1"
lines = [
    [], ["--help"], ["help"], ["help", "stores"],
    *(line for name in SUMMARIES for line in ([name, "--help"], ["help", name])),
    ["inspect", step], ["inspect", run], ["inspect", step, "--html", f"{run}.html"],
    ["diff", step, model], ["extract", step, "model.embed.weight"],
    ["convert", step, f"{run}.pt"], ["reshard", step, f"{run}-2", "--mesh", "2"],
    ["verify", step], ["verify", step, "--against", step], ["verify", run, "--latest-good"],
    ["prune", run, "--keep-last", "1"], ["formats"], ["maps"], ["maps", "torchtitan-llama3"],
]
for line in lines:
    sys.argv[1:] = line
    code = _run()
    if code not in (0, 1) and line:
        sys.exit(f"{line} ended with {code}")
print("all")
"""


def test_every_command_runs(tmp_path: Path) -> None:
    for step in ("step-1", "step-2"):
        shutil.copytree(case("dcp_fsdp2_tp").path, tmp_path / "run" / step)
    words = [str(tmp_path / "run"), str(case("hf_full").path)]
    ran = subprocess.run(
        [sys.executable, "-OO", "-c", PROGRAM, *words],
        env=os.environ | {"PAGER": "cat"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["all"]), ran.stderr
    assert "Check that a checkpoint is complete" in ran.stdout
