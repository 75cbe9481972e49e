"""The bench of loads: that each row loads every bit, never its speed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_server import forking_python

from benchmarks import load_programs, loads
from benchmarks.forked_rows import forked
from benchmarks.loads import LOAD_ROWS, load_bench
from benchmarks.rows import PROGRAM

SIZE = 400_000


def test_every_row_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(forking_python(tmp_path))
    monkeypatch.setattr(loads, "PROGRAM", (python, *PROGRAM[1:]))
    rows = tuple(forked(row, python) for row in LOAD_ROWS)
    report = load_bench(SIZE, "cpu", tmp_path, 1, rows=rows)
    measured = [result.row.name for result in report.results]
    assert [*measured, *report.skipped] == sorted(
        [row.name for row in LOAD_ROWS], key=lambda name: name in report.skipped
    )
    assert SIZE / 2 < report.nbytes < SIZE * 2
    assert all(result.nbytes >= report.nbytes for result in report.results)
    assert not [*tmp_path.glob("ckptool-bench-*")]


def test_a_loader_that_leaves_bits_out_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_programs.write_loads(str(tmp_path / "model"), SIZE)
    monkeypatch.setitem(load_programs._WAYS, "lazy", lambda source, state, device: state)
    words = (str(tmp_path / "model" / "dcp"), "cpu", str(tmp_path / "result"))
    with pytest.raises(ValueError, match=r"64 tensors differ, such as layers\.0\.weight"):
        load_programs.measure_load_onto("lazy", *words)
    assert not (tmp_path / "result").exists()
