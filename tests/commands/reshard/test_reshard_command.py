"""The command line of reshard: its report, its words and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import (
    case,
    read_back,
    run_command,
)
from reshard_runs import prepared, source
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.reshard import reshard as reshard_module
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.render.reshard import show_reshard


def test_the_report_is_json(source: Path, out: Path) -> None:
    done = run_command("reshard", source, out / "r", "--mesh", "dp=2,tp=2", "--json", "--no-fsync")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "ckptool.reshard/2"
    assert report["mesh"] == {"shape": [2, 2], "names": ["dp", "tp"]}
    assert report["written"] is True
    assert {row["name"] for row in report["tensors"]} == set(read_back("dcp", source))
    assert sum(row["bytes"] for row in report["files"]) == report["write_bytes"]
    assert len(report["rank_bytes"]) == 4


def test_the_source_is_the_current_folder(source: Path, out: Path) -> None:
    shutil.copytree(source, out / "step-5")
    done = run_command("reshard", "--mesh", "2x2", "--no-fsync", cwd=out / "step-5")
    assert done.code == 0, done.stderr
    assert "step-5-2x2" in done.stdout
    assert read_back("dcp", out / "step-5-2x2") == read_back("dcp", source)


def test_a_rule_is_shown_as_it_was_said(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = prepared(source, out / "r", "2", rules=("*[/a-z]*=Shard(0)",))
    show_reshard(planned.with_costs())
    assert "Shard(0)  (rule *[/a-z]*)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--mesh", "0"), 2),
        (("--mesh", "2", "--shard", "nothing=Shard(0)"), 2),
        ((), 2),
        (("--mesh", "2", "--from", "hf"), 3),
        (("--mesh", "2", "--check"), 4),
    ],
    ids=str,
)
def test_exit_codes(words: tuple[str, ...], code: int, source: Path, out: Path) -> None:
    done = run_command("reshard", source, out / "r", *words)
    assert done.code == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=str)
def test_of_a_refused_check_only_a_dry_run_shows_the_plans_notes(
    more: tuple[str, ...], out: Path
) -> None:
    """They come before the error; what is not begun has none."""
    words = ("--mesh", "2", "--to", "dcp", "--rank-state", "drop", "--check", *more)
    done = run_command("reshard", case("accelerate_folders").path, out / "r", *words)
    assert done.code == 4, done.stderr
    notes, _, _ = done.stderr.partition("error: --check: the mesh has")
    assert notes.startswith("note: ") if more else not notes
    assert list(out.iterdir()) == []


def test_a_source_that_is_not_there(out: Path) -> None:
    assert run_command("reshard", out / "missing", out / "r", "--mesh", "2").code == 3


def test_the_module_is_what_the_command_calls() -> None:
    assert reshard_module.prepare_reshard is prepare_reshard


@pytest.mark.parametrize("part", [None, "1/1"])
def test_missing_folders_around_a_target_are_made(
    source: Path, out: Path, part: str | None
) -> None:
    target = out / "a" / "b" / "r"
    arguments = ["reshard", str(source), str(target), "--mesh", "2", "-q"]
    result = CliRunner().invoke(app, [*arguments, *(["--part", part] if part else [])])
    assert result.exit_code == 0, result.output
    assert [path.name for path in (out / "a").iterdir()] == ["b"]
    if part is None:
        assert [path.name for path in (out / "a" / "b").iterdir()] == ["r"]
