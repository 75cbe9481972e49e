"""What the command line takes and says of parts, and ranks of torchrun that share one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import on_ranks
from fault_runs import run
from msgspec.structs import replace
from parts.part_runs import alone, asked, content, convert, refused, reshard

from ckptool.engine.share import parse_part
from ckptool.errors import (
    UsageError,
)


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/3", "-1/3", "1/", "1/0", "1/2/3"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    refused(lambda: parse_part(part, "--part"), "invalid --part", UsageError)


def test_options_that_do_not_go_together(source: Path, tmp_path: Path) -> None:
    both = asked("1/2", finish=True)
    for transfer in (both, asked("1/2", resume=True), asked(finish=True, resume=True)):
        planned = convert("dcp")(source, tmp_path / "m", transfer)
        refused(planned.run, "--part|--finish", UsageError)
    checked = reshard("2")(source, tmp_path / "m", asked("1/2"))
    refused(replace(checked, check=True).run, "--finish", UsageError)


def test_what_is_reported_of_a_part(source: Path, tmp_path: Path) -> None:
    log, target = tmp_path / "log", tmp_path / "m"
    line = ["convert", str(source), str(target), "--to", "dcp", "--part", "1/1"]
    ended = run([*line, "--json"], log)
    report = json.loads(ended.words)
    assert (report["written"], report["part"]["done"]) == (False, True)
    assert (report["part"]["number"], report["part"]["of"]) == (1, 1)
    assert report["part"]["bytes"] == sum(file["bytes"] for file in report["files"])
    assert "wrote part 1 of 1 of" in run(line, log).words
    finished = run([*line[:-2], "--finish", "--json"], log)
    report = json.loads(finished.words)
    assert (report["written"], report["part"]) == (True, None)


def test_a_dry_run_says_what_a_part_would_write(source: Path, tmp_path: Path) -> None:
    for words in (["convert", "--to", "dcp"], ["reshard", "--mesh", "2"]):
        line = [words[0], str(source), str(tmp_path / "m"), *words[1:], "--dry-run"]
        part = json.loads(run([*line, "--part", "1/2", "--json"], tmp_path / "log").words)["part"]
        files = "1 file" if part["files"] == 1 else f"{part['files']} files"
        said = run([*line, "--part", "1/2"], tmp_path / "log").words
        assert f"of this, part 1 of 2 writes {files}, " in said
        assert not part["done"]
        assert "of this" not in run(line, tmp_path / "log").words


def test_torchrun_shares_a_conversion(source: Path, out: Path) -> None:
    truth = alone("folder of models", source, out / "alone")
    words = (source, out / "m", "--to", "hf", "--max-shard-size", "1500")
    ended = on_ranks(2, ("-m", "ckptool", "convert", *words))
    assert [one.code for one in ended] == [0, 0], ended[0].stderr
    assert [bool(one.stdout) for one in ended] == [True, False]
    assert content(out / "m") == {key.removeprefix("m/"): data for key, data in truth.items()}
