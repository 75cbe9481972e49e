"""The reports of commands as functions: what they print, and whether the answer is yes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import case
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app

SOURCE = case("dcp_fsdp2_tp").path


def printed(*words: object) -> dict[str, Any]:
    """What the command line prints as JSON."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    content: dict[str, Any] = json.loads(done.stdout)
    return content


CALLS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], list[object]]]] = {
    "convert": (
        lambda out: ckptool.convert(SOURCE, out / "m", to="dcp", map=None, dry_run=True),
        lambda out: ["convert", SOURCE, out / "m", "--to", "dcp", "--dry-run"],
    ),
    "reshard": (
        lambda out: ckptool.reshard(SOURCE, out / "m", mesh="2", dry_run=True),
        lambda out: ["reshard", SOURCE, out / "m", "--mesh", "2", "--dry-run"],
    ),
    "inspect": (lambda _: ckptool.inspect(SOURCE), lambda _: ["inspect", SOURCE]),
    "verify": (lambda _: ckptool.verify(SOURCE), lambda _: ["verify", SOURCE]),
    "compare": (
        lambda _: ckptool.compare(SOURCE, case("dcp_base").path),
        lambda _: ["verify", SOURCE, "--against", case("dcp_base").path],
    ),
    "diff": (
        lambda _: ckptool.diff(SOURCE, case("dcp_base").path),
        lambda _: ["diff", SOURCE, case("dcp_base").path],
    ),
    "verify_run": (
        lambda _: ckptool.verify_run(SOURCE.parent),
        lambda _: ["verify", SOURCE.parent, "--latest-good"],
    ),
}


def totaled(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The report, or both sides of a diff, or each step's reports: those with totals."""
    steps = [each for step in told.get("steps", ()) for each in step["reports"]]
    return steps or ([told["a"], told["b"]] if "a" in told else [told])


@pytest.mark.parametrize("call", CALLS)
def test_a_report_as_a_dict_is_what_the_command_prints(call: str, out: Path) -> None:
    run, words = CALLS[call]
    report = run(out)
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    shown = printed(*words(out))
    assert told | {"free_bytes": 0} == shown | {"free_bytes": 0}
    assert isinstance(told.get("tensors", []), list)
    assert all(isinstance(each["totals"]["tensors"], int) for each in totaled(told))
    assert repr(report).startswith(f"<ckptool.{type(report).__name__} ")
    assert len(repr(report)) < 700
    assert "<table>" in report._repr_html_()


def test_a_report_is_true_where_the_answer_is_yes(run: Path, out: Path) -> None:
    assert ckptool.verify(run / "step-10")
    assert not ckptool.verify(run / "step-30")
    assert ckptool.verify_run(run)
    assert not ckptool.verify_run(run, every=True)
    assert not ckptool.salvage(run / "step-30", out / "left")
    assert not ckptool.convert(SOURCE, out / "m", to="dcp", dry_run=True).written
    assert ckptool.convert(SOURCE, out / "m", to="dcp", fsync=False).written


def test_a_report_says_of_what_it_is_and_its_answer() -> None:
    compared = ckptool.compare(SOURCE, SOURCE)
    assert f"path={str(SOURCE)!r}" in repr(compared)
    assert "ok=True, summary='EQUAL: " in repr(compared)
    assert f"latest_good={str(SOURCE)!r}" in repr(ckptool.verify_run(SOURCE))


@pytest.fixture
def run(out: Path) -> Path:
    """Three steps; the newest has a truncated file."""
    for step in (10, 20, 30):
        shutil.copytree(SOURCE, out / "run" / f"step-{step}")
    cut = max((out / "run" / "step-30").glob("*.distcp"))
    cut.write_bytes(cut.read_bytes()[:-200])
    return out / "run"


def test_the_newest_good_step(run: Path) -> None:
    found = ckptool.verify_run(run)
    assert found.latest_good is not None
    assert found.latest_good.path == run / "step-20"
    assert [one.ok for one in ckptool.verify_run(run, every=True).steps] == [
        False,
        True,
        True,
    ]


def test_what_is_left_of_a_damaged_one(run: Path, out: Path) -> None:
    report = ckptool.salvage(run / "step-30", out / "left")
    assert report.lost
    kept = ckptool.open(out / "left").tensors
    assert len(kept) == report.tensors > 0
