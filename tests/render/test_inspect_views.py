"""Names found by a part of them, modules, sizes, several pictures; rows that never look alike."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
import torch
from conftest import case, inspect_one
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.render.inspect.listing import stats_lines, tensor_lines, value_lines
from ckptool.render.inspect.overview import module_lines, overview
from ckptool.render.text import columns

STATE = {
    "model.embed.weight": torch.zeros(50, 4),
    **{f"model.layers.{i}.attn.q_proj.weight": torch.zeros(4, 4) for i in (0, 2, 10)},
    **{f"model.layers.{i}.mlp.w": torch.zeros(8 * (i + 1)).half() for i in (0, 2, 10)},
    "head": torch.zeros(3),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file(STATE, tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def run(*words: str) -> list[str]:
    done = CliRunner().invoke(app, ["inspect", *words])
    assert done.exit_code == 0, done.exception
    return done.stdout.splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.strip()]


@pytest.mark.parametrize("option", ["--tensors", "--stats"])
def test_a_part_of_a_name_finds_all_that_contain_it(option: str, path: str) -> None:
    found = names(run(path, option, "q_proj"))[1:]
    assert sorted(found) == sorted(f"model.layers.{i}.attn.q_proj.weight" for i in (0, 2, 10))
    assert names(run(path, option, "head"))[1:] == ["head"]
    assert names(run(path, option, "*.10.*.w"))[1:] == ["model.layers.10.mlp.w"]


def test_a_whole_name_is_that_tensor_alone(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1), "w.scale": torch.zeros(1)}, tmp_path / "m.safetensors")
    assert names(run(str(tmp_path / "m.safetensors"), "--tensors", "w"))[1:] == ["w"]


def test_tensors_by_size(path: str) -> None:
    sized = names(run(path, "--tensors", "*", "--sort", "size"))[1:]
    assert sized[:2] == ["model.embed.weight", "model.layers.10.mlp.w"]
    entries = inspect_one(path).catalog.tensors
    assert sized[-1] == "head"
    assert [entries[n].nbytes for n in sized] == sorted(e.nbytes for e in entries.values())[::-1]
    tensors = json.loads("\n".join(run(path, "--json", "--sort", "size")))["tensors"]
    assert [each["name"] for each in tensors] == sized
    folded = [line for line in run(path, "--sort", "size") if "[" in line]
    assert folded[0].split() == ["model.embed.weight", "[50,", "4]", "fp32", "800", "B"]


def test_modules(path: str) -> None:
    lines = run(path, "--depth", "3", "--sort", "size")
    assert names(lines)[1:3] == ["model.embed", "model.layers.10"]
    found = json.loads("\n".join(run(path, "--depth", "3", "--json")))["modules"]
    rows = {m["module"]: (m["tensors"], m["elements"], m["bytes"], m["dtypes"]) for m in found}
    assert list(rows) == ["head", "model.embed", *(f"model.layers.{i}" for i in (0, 2, 10))]
    assert rows["model.layers.2"] == (2, 16 + 24, 64 + 48, ["float32", "float16"])
    assert sum(nbytes for _, _, nbytes, _ in rows.values()) == sum(
        tensor.nbytes for tensor in STATE.values()
    )
    assert names(run(path, "--depth", "1"))[1:] == ["head", "model"]


def test_shards_of_several_tensors(path: str) -> None:
    pictures = [line for line in run(path, "--shards", "*.q_proj.*") if line.startswith("model.")]
    assert len(pictures) == 3
    rows = json.loads("\n".join(run(path, "--shards", "q_proj", "--json")))["shards"]
    assert {row["tensor"] for row in rows} == {
        f"model.layers.{i}.attn.q_proj.weight" for i in (0, 2, 10)
    }


# Rows


WORDS = st.text("abcd.", min_size=1, max_size=60)


@given(st.lists(WORDS, min_size=2, max_size=12, unique=True), st.integers(20, 60))
def test_cut_rows_never_look_alike(cells: list[str], width: int) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=width)
    lines = columns(screen, [(cell, "[4, 4]") for cell in cells], "ll", cuts=0)
    shown = [line.plain for line in lines]
    assert len({*shown}) == len(cells)


CELLS = st.text("abc .(/é漢", max_size=50)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6),
    st.integers(30, 120),
    st.sampled_from([None, 0, 1, 2]),
)
@example([("", " ca/", "."), ("a" * 19, "b" * 11, "c" * 27)], 34, 1)
@example([("", "漢", ""), ("a" * 29, "b", "c" * 40)], 34, None)
def test_no_line_of_a_table_is_wider_than_the_terminal(
    rows: list[tuple[str, ...]], width: int, cuts: int | None
) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=width)
    lines = columns(screen, rows, "lrl", cuts=cuts)
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        assert all(cell_len(part) <= width for part in line.plain.split("\n"))
        shown = re.sub(r"\s", "", line.plain)
        if "…" not in shown:
            assert sorted(shown) == sorted(re.sub(r"\s", "", "".join(row)))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "deepspeed_experts"])
def test_no_line_of_a_listing_is_wider_than_the_terminal(name: str, width: int) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=width)
    report = inspect_one(case(name).path)
    stats = ckptool.stats(case(name).path, "*")
    views = (
        overview(report, screen)[1:],  # the path comes first, whole
        tensor_lines(report.catalog, ["*"], screen),
        module_lines(report, 2, screen),
        value_lines(report.catalog, screen),
        stats_lines(tuple(stats), screen),
    )
    lines = [part for view in views for line in view for part in line.plain.split("\n")]
    wide = [line for line in lines if cell_len(line) > width and "use --values" not in line]
    assert not wide


def test_the_cut_is_where_the_rows_are_alike() -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=40)
    cells = [f"model.layers.{i}.self_attn.{p}_proj.weight.of.all" for i in (1, 2) for p in "qkvo"]
    lines = columns(screen, [(cell,) for cell in cells], "l", cuts=0)
    assert all(len(line.plain) <= 40 for line in lines)
    assert len({line.plain for line in lines}) == 8
