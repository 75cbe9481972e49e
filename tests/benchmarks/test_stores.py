"""The bench of stores: its report and what it leaves behind, never its speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fork_server import forking_python

from benchmarks import stores as bench
from benchmarks.forked_rows import forked
from benchmarks.report import TransferBenchReport
from benchmarks.rows import CONVERT, PROGRAM, Row
from benchmarks.store_rows import STORE_ROWS
from benchmarks.stores import store_bench
from benchmarks.table import show_transfer_bench
from ckptool.errors import Unsupported

SIZE = 4_000_000
FOREIGN = {"s3torchconnector", "runai_model_streamer"}
"""What need not be there."""
MEASURED = [row.name for row in STORE_ROWS if not FOREIGN.intersection(row.needs)]
ABSENT = Row("absent", (sys.executable, "-c", "pass"), needs=("no_such_client",))
FAILING = Row("failing", (sys.executable, "-c", "raise SystemExit('no luck')"), needs=("s3fs",))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def report(workdir: Path, tmp_path_factory: pytest.TempPathFactory) -> TransferBenchReport:
    for package in ("torch", "s3fs", "boto3"):
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as patch:
        python = str(forking_python(tmp_path_factory.mktemp("bin")))
        patch.setattr(bench, "PROGRAM", (python, *PROGRAM[1:]))
        patch.setattr(bench, "CONVERT", (python, *CONVERT[1:]))
        patch.setattr(bench, "_LATENCY", 0.0)
        rows = tuple(forked(row, python) for row in (*STORE_ROWS, ABSENT, FAILING))
        return store_bench(SIZE, workdir, 1, rows=rows)


def row_of(report: TransferBenchReport, name: str) -> Any:
    return next(row for row in report.to_dict()["rows"] if row["name"] == name)


def test_every_row_is_measured_that_can_be(report: TransferBenchReport) -> None:
    measured = [result.row.name for result in report.results]
    assert [name for name in measured if name in MEASURED] == MEASURED
    for result in report.results:
        assert result.median > 0
        assert result.nbytes > SIZE / 2


def test_a_client_that_is_missing_or_fails_is_named(report: TransferBenchReport) -> None:
    assert report.skipped["absent"] == "no_such_client is not installed"
    assert "no luck" in report.skipped["failing"]


def test_what_a_plain_download_asks_for_is_counted(report: TransferBenchReport) -> None:
    row = row_of(report, "boto3 download")
    assert report.nbytes <= row["read_bytes"] < 1.01 * report.nbytes
    assert row["requests"] == 1 + 2 * report.files  # the listing; of each file, its size and bytes
    assert row["written_bytes"] < 1000


def test_what_goes_back_into_the_store_is_counted(report: TransferBenchReport) -> None:
    for name in ("boto3 download, upload", "reshard s3 -> s3, --mesh 2x4"):
        assert report.nbytes <= row_of(report, name)["written_bytes"] < 1.3 * report.nbytes


def test_nothing_is_left_behind(report: TransferBenchReport, workdir: Path) -> None:
    assert list(workdir.iterdir()) == []


def test_json_and_the_table_hold_every_row(
    report: TransferBenchReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads(json.dumps(report.to_dict()))
    assert {row["name"] for row in told["rows"]} == {result.row.name for result in report.results}
    assert told["settings"]["conditions"] == "S3 on loopback, 0 ms and 200 MB/s"
    monkeypatch.setenv("COLUMNS", "200")
    show_transfer_bench(report)
    screen = capsys.readouterr().out
    assert all(name in screen for name in MEASURED)
    assert "requests, reads 1.00 x" in screen


def test_without_a_client_there_is_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="s3fs is not installed") as caught:
        store_bench(SIZE, tmp_path, 1)
    assert caught.value.hint == "pip install 'ckptool[s3]'"
