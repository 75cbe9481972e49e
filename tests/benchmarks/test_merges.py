"""The bench of merges: that each row is a merge that works, never its speed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_server import forking_python

from benchmarks import merges as bench
from benchmarks.forked_rows import forked
from benchmarks.merges import MERGE_ROWS, merge_bench
from benchmarks.rows import PROGRAM

SIZE = 200_000
MEASURED = tuple(row for row in MERGE_ROWS if not row.cold or row.name == "cp, cold")


def test_every_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(forking_python(tmp_path))
    monkeypatch.setattr(bench, "PROGRAM", (python, *PROGRAM[1:]))
    rows = tuple(forked(row, python) for row in MEASURED)
    report = merge_bench(SIZE, tmp_path, 1, rows=rows)
    assert [result.row.name for result in report.results] == [row.name for row in MEASURED]
    assert SIZE / 2 < report.nbytes < SIZE * 2
    for result in report.results:
        assert len(report.ratios(result)) == len(result.row.peers)
        assert (result.nbytes > 0) == ("plan" not in result.row.name)
    assert not [*tmp_path.glob("ckptool-bench-*")]
