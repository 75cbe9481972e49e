"""What CI runs: the steps of the GitHub action, and the hook of pre-commit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import case

from ckptool.cli.app import load_command

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / ".github/actions/verify/action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return one with a command ckptool that runs this checkout, as on a runner of GitHub."""
    program = tmp_path / "bin" / "ckptool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckptool "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    output = {"GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": str(tmp_path / "output")}
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **output}


def run_action(environment: dict[str, str], cwd: Path, **inputs: str) -> Any:
    """Run the step that verifies, with its environment made of inputs as GitHub makes it."""
    (step,) = [step for step in ACTION["runs"]["steps"] if step.get("id") == "verify"]
    values = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | inputs
    made = {
        name: values[text.removeprefix("${{ inputs.").removesuffix(" }}")]
        for name, text in step["env"].items()
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env=environment | made,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def outputs(environment: dict[str, str]) -> dict[str, str]:
    lines = Path(environment["GITHUB_OUTPUT"]).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_the_action_passes_a_good_checkpoint(environment: dict[str, str], tmp_path: Path) -> None:
    path = str(case("dcp_base").path)
    done = run_action(environment, tmp_path, path=path, arguments="--quick --strict")
    assert done.returncode == 0, done.stderr
    assert outputs(environment) == {"ok": "true", "junit": "ckptool-verify.xml"}
    assert len(ElementTree.parse(tmp_path / "ckptool-verify.xml").getroot()) == 1


def test_the_action_fails_a_damaged_one(
    environment: dict[str, str], flipped: Path, tmp_path: Path
) -> None:
    done = run_action(environment, tmp_path, path=str(flipped), junit="x.xml")
    assert done.returncode == 1
    assert outputs(environment)["ok"] == "false"
    assert "::error file=" in done.stderr
    assert "crc-mismatch" in (tmp_path / "x.xml").read_text()


def test_what_is_given_to_the_action_is_never_run(
    environment: dict[str, str], tmp_path: Path
) -> None:
    trap = '"; touch EXECUTED; $(touch EXECUTED) `touch EXECUTED`'
    done = run_action(environment, tmp_path, path=trap, arguments=trap)
    assert done.returncode != 0
    assert not (tmp_path / "EXECUTED").exists()
    runs = [step["run"] for step in ACTION["runs"]["steps"]]
    assert not [run for run in runs if "${{" in run]


def test_the_documentation_uses_what_there_is() -> None:
    page = (ROOT / "ckptool" / "docs" / "verify.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    used = {key: value for block in blocks for item in block for key, value in item.items()}
    assert (ROOT / used["uses"].removeprefix("./tools/ckptool/") / "action.yml").is_file()
    assert set(used["with"]) <= set(ACTION["inputs"])
    assert [hook["id"] for hook in used["hooks"]] == [HOOK["id"]]


def test_the_hook_of_pre_commit(environment: dict[str, str], flipped: Path, tmp_path: Path) -> None:
    def code(*arguments: str) -> int:
        words = [*shlex.split(HOOK["entry"]), *arguments]
        return subprocess.run(words, env=environment, capture_output=True, check=False).returncode

    assert code(str(case("dcp_base").path), "--strict") == 0
    assert code(str(flipped)) == 1
    assert HOOK["pass_filenames"] is False
    assert "source" in {each.name for each in load_command("verify").params}
