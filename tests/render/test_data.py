"""inspect --format csv and markdown: what a spreadsheet reads is what --json says."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import case
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ckptool.cli.app import app

VIEWS = {
    "tensors": ["--tensors", "*"],
    "modules": ["--depth", "2"],
    "shards": ["--shards", "*weight"],
    "rank_bytes": ["--rank-bytes"],
    "holdings": ["--mesh", "2x4"],
    "values": ["--values"],
    "stats": ["--stats", "*weight"],
}
HOSTILE = ["a|b", "c\nd", "`*x*`", "[l](http://x)", "<b>", "__init__", "plain_name.weight"]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["inspect", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("view", VIEWS)
def test_csv_has_a_row_for_each_of_json(view: str) -> None:
    words = [str(case("dcp_fsdp2_tp").path), *VIEWS[view]]
    rows = list(csv.DictReader(io.StringIO(run(*words, "--format", "csv"))))
    expected = json.loads(run(*words, "--json"))[view]
    assert len(rows) == len(expected) > 0
    numbers = {key for key, value in expected[0].items() if type(value) is int}
    key = next(iter(expected[0]))
    for row, known in zip(
        sorted(rows, key=lambda r: r[key]), sorted(expected, key=lambda r: str(r[key])), strict=True
    ):
        assert row.keys() >= known.keys()
        assert {name: row[name] for name in numbers} == {n: str(known[n]) for n in numbers}


def test_no_name_breaks_a_row_of_csv_or_is_a_formula(tmp_path: Path) -> None:
    names = ["=cmd|' /C calc'!A0", "@x", "+x", "-x", "c\rd", "e\nf", "\x1b[31mred", "-1", "w, 1"]
    save_file({name: np.ones(1, np.float32) for name in names}, tmp_path / "m.safetensors")
    text = run(str(tmp_path / "m.safetensors"), "--format", "csv")
    assert "\x1b" not in text
    assert {row["name"] for row in csv.DictReader(io.StringIO(text))} == {
        *("'=cmd|' /C calc'!A0", "'@x", "'+x", "'-x", "-1", "w, 1"),
        *(r"c\rd", r"e\nf", r"\x1b[31mred"),
    }


def test_no_name_is_markup_or_breaks_a_row(tmp_path: Path) -> None:
    from markdown_it import MarkdownIt

    save_file({name: np.ones(1, "f4") for name in HOSTILE}, tmp_path / "m.safetensors")
    table = run(str(tmp_path / "m.safetensors"), "--format", "markdown")
    tokens = MarkdownIt("commonmark").enable("table").parse(table)
    names = [
        token.children
        for before, token in pairwise(tokens)
        if before.type == "td_open" and token.children
    ][::6]
    assert all(child.type in ("text", "text_special") for children in names for child in children)
    shown = {"".join(child.content for child in children) for children in names}
    assert shown == {name.replace("\n", "\\n") for name in HOSTILE}
