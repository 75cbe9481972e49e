"""What GitHub reads of the project, and the suites that CI runs after the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptool.version import __version__

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in GITHUB.glob("workflows/*.yml")}
FORMS = [path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.stem != "config"]
SUITES = ("stores", "torchtitan", "pages", "faults", "mutations")


def jobs_of(workflow: str) -> dict[str, Any]:
    return yaml.safe_load(WORKFLOWS[workflow].read_text())["jobs"]


def test_actions_are_pinned_to_commits() -> None:
    used = [
        use for path in WORKFLOWS.values() for use in re.findall(r"uses: (.*)", path.read_text())
    ]
    assert used
    for use in used:
        assert re.fullmatch(r"\./.*|[\w/-]+@[0-9a-f]{40} # v[\d.]+", use), use


def test_only_the_job_that_publishes_may_do_more_than_read() -> None:
    for name, path in WORKFLOWS.items():
        whole = yaml.safe_load(path.read_text())
        assert whole["permissions"] in ({}, {"contents": "read"}), name
        for job, steps in whole["jobs"].items():
            allowed = {"id-token": "write"} if job == "publish" else {"contents": "read"}
            assert steps.get("permissions", allowed) == allowed, (name, job)
    assert {*jobs_of("release")["publish"]["needs"]} == {"test", "build"}


def test_workflows_make_what_the_makefile_makes() -> None:
    lines = [
        step["run"]
        for name in WORKFLOWS
        for job in jobs_of(name).values()
        for step in job.get("steps", ())
        if "run" in step
    ]
    made = {line.removeprefix("make ") for line in lines if line.startswith("make ")}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"test", "suites", "package"} <= made <= targets


def test_forms_ask_for_something() -> None:
    assert {path.stem for path in FORMS} == {"bug", "feature", "unread"}
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        asked = [item for item in form["body"] if item["type"] != "markdown"]
        assert form["name"]
        assert form["description"]
        assert len({item["id"] for item in asked}) == len(asked)
        assert any(item.get("validations", {}).get("required") for item in asked)


def test_the_changelog_tells_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(__version__)}$", text, re.M)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout on a machine that has a shell and nothing that suites need."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "suites", tmp_path / ".ci")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "dirname", "mkdir", "date", "tail", "id", "timeout"):
        (programs / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def put(machine: Path, program: str, script: str) -> None:
    path = machine / program
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_suites(machine: Path) -> tuple[int, dict[str, str]]:
    """The exit code, and how each suite ended."""
    done = subprocess.run(
        [machine / ".ci" / "suites"],
        env={**os.environ, "PATH": str(machine / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    end = done.stdout.rpartition("Suites beyond make test:\n")[2]
    return done.returncode, dict(re.findall(r"^(\w+) +(.*)$", end, re.M))


def test_suites_whose_tools_are_not_to_be_had_are_named_and_fail_nothing(machine: Path) -> None:
    put(machine, "bin/make", 'case "$*" in *mutations*) ;; *) exit 1;; esac')
    code, ended = run_suites(machine)
    assert code == 0
    assert list(ended) == list(SUITES)
    assert ended.pop("mutations").startswith("passed in ")  # it needs no tool
    assert all(how.startswith("skipped: ") for how in ended.values())
    assert "no npm here" in ended["stores"]
    assert "no apt-get here to install chromium" in ended["pages"]
    put(machine, "bin/sudo", "exit 1")
    put(machine, "bin/apt-get", "exit 100")
    assert "apt-get cannot install strace" in run_suites(machine)[1]["faults"]


def test_a_suite_that_fails_fails_all(machine: Path) -> None:
    for program in ("npm", "chromium", "strace"):
        put(machine, f"bin/{program}", "exit 0")
    put(machine, ".venv/npm/node_modules/.bin/azurite-blob", "exit 0")
    put(machine, ".venv-torchtitan/bin/python", "exit 0")
    put(machine, "bin/make", "exit 0")
    code, ended = run_suites(machine)
    assert code == 0
    assert all(re.fullmatch(r"passed in \d+ s", how) for how in ended.values())
    put(machine, "bin/make", 'case "$*" in *pages*) exit 2;; *faults*) exit 124;; esac')
    code, ended = run_suites(machine)
    assert code == 1
    assert [suite for suite, how in ended.items() if how == "FAILED"] == ["pages"]
    assert ended["faults"] == "not finished in 600 s"
