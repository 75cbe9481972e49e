"""The transfer bench: its report and what it leaves behind, never its speed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from fork_server import forking_python

from benchmarks import __main__ as command_line
from benchmarks import page_cache, scene
from benchmarks import transfer as bench
from benchmarks.__main__ import main
from benchmarks.forked_rows import forked
from benchmarks.programs import plan_large
from benchmarks.report import RowResult, TransferBenchReport
from benchmarks.rows import PROGRAM, ROWS, Row
from benchmarks.samples import Sample, run_sample
from benchmarks.scene import Scene, measure
from benchmarks.table import show_transfer_bench
from benchmarks.transfer import transfer_bench
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.read_ahead import cached_bytes

SIZE = 2_000_000
ALIKE = re.compile(
    r"plan |dcp.load, (row shards|columns, (ckptool|torch))|(verify|inspect), 1,000 tensors"
    r"|reshard --mesh 2x4, a quarter|convert --to (dcp|safetensors, verified)"
    r"|verify, 100,000|verify --(against|write)|.*synced|(cp|convert|reshard).* (runs of|small)"
)
"""Begin rows that differ from others in size, shape, dim or an option alone."""
MEASURED = tuple(row for row in ROWS if not ALIKE.match(row.name))
HEADER = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
ONE_BYTE = len(HEADER).to_bytes(8, "little") + HEADER + b"x"
"""A safetensors file."""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def report(workdir: Path, tmp_path_factory: pytest.TempPathFactory) -> TransferBenchReport:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    with pytest.MonkeyPatch.context() as patch:
        python = str(forking_python(tmp_path_factory.mktemp("bin")))
        patch.setenv("PYTHON_EXEC", python)  # what torchrun starts its ranks with
        patch.setattr(bench, "PROGRAM", (python, *PROGRAM[1:]))
        patch.setattr(bench, "_MANY", ("20", "4"))
        patch.setattr(bench, "_NAMES", "20")
        rows = tuple(forked(row, python) for row in MEASURED)
        return transfer_bench(None, SIZE, workdir, 1, rows=rows)


def test_every_row_is_measured(report: TransferBenchReport) -> None:
    assert not report.skipped
    assert [result.row.name for result in report.results] == [row.name for row in MEASURED]
    for result in report.results:
        assert len(result.samples) == 1
        assert result.median > 0
        assert len(report.ratios(result)) == len(result.row.peers)


def test_the_checkpoint_is_of_the_size_asked(report: TransferBenchReport) -> None:
    assert SIZE / 2 < report.nbytes < SIZE * 2
    assert report.files == 5
    assert report.light_tensors >= 200


def test_light_commands_leave_torch_alone(report: TransferBenchReport) -> None:
    told = {result.row.name: result.imports_torch for result in report.results}
    assert told["--help"] is False
    assert told["inspect"] is False
    assert told["cp -r"] is None


def test_loads_tell_what_they_read(report: TransferBenchReport) -> None:
    read = {one.row.name: one.read_bytes for one in report.results if one.row.measure == "load"}
    assert len(read) == 2
    assert all(nbytes >= SIZE / 2 for nbytes in read.values())
    ours, theirs = (
        f"dcp.load, columns, runs of 8 KiB, {who} reader" for who in ("ckptool's", "torch's")
    )
    assert read[ours] < read[theirs] / 2


def test_what_takes_long_is_measured_in_the_first_round_alone(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(ONE_BYTE)
    once = Row("once", ("true",), once=True)
    rows = (once, Row("each", ("true",), peers=("once",), cold=True))
    told = transfer_bench(tmp_path / "x.safetensors", 1, tmp_path, 3, rows=rows)
    assert [len(result.samples) for result in told.results] == [1, 3]
    assert len(told.ratios(told.results[1])) == 1


def test_commands_are_compiled_before_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.py").write_text("x = 1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(scene, "_PACKAGE", tmp_path)
    measure((), Scene({}), 1, {}, lambda line: None)
    assert list((tmp_path / "__pycache__").glob("module.*.pyc"))


def test_the_page_cache_is_full_before_commands_of_large_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(1 << 10))
    (tmp_path / "outputs").mkdir()
    free = iter([9 << 20, 7 << 20, 7 << 20, 6 << 20, 6 << 20, 6 << 20])
    monkeypatch.setattr(page_cache, "_STEP", 2 << 20)
    monkeypatch.setattr(page_cache, "free_memory", lambda: next(free))
    at = Scene({"{source}": str(tmp_path / "x"), "{target}": str(tmp_path / "outputs" / "t")})
    for least in (1 << 10, (1 << 10) - 1):
        monkeypatch.setattr(scene, "_LARGE", least)
        at.take_sample(Row("", ("true", "{source}")))
    assert list(free) == []  # three steps: the first two took 2 and 1 MiB, the last none
    filler = tmp_path / "filler"
    assert filler.stat().st_size > 2 << 20
    assert filler.stat().st_blocks == 0


def test_memory_that_holds_nothing_is_counted() -> None:
    assert 0 < page_cache.free_memory() < 2 << 50


@pytest.mark.parametrize("cold", [True, False])
def test_what_is_read_is_cold_or_in_the_page_cache(cold: bool, tmp_path: Path) -> None:
    file, target = tmp_path / "x", tmp_path / "outputs" / "target"
    file.write_bytes(bytes(1 << 20))
    target.parent.mkdir()
    at = Scene({"{source}": str(file), "{target}": str(target)})
    at.take_sample(Row("", ("true", "{source}"), cold=not cold))
    at.take_sample(Row("", ("true", "{source}"), cold=cold))
    with open(file, "rb") as stream:
        known = cached_bytes(stream.fileno(), 0, 1 << 20)
    if known is None or (cold and known):
        pytest.skip("this system does not say what is cached, or keeps it")
    assert known == (0 if cold else 1 << 20)


def test_nothing_is_left_behind(report: TransferBenchReport, workdir: Path) -> None:
    assert list(workdir.iterdir()) == []


def test_json_holds_every_sample(report: TransferBenchReport) -> None:
    told = json.loads(json.dumps(report.to_dict()))
    assert told["schema"] == "ckptool.transfer-bench/2"
    assert told["settings"]["repeat"] == 1
    assert [len(row["samples"]) for row in told["rows"]] == [1] * len(MEASURED)
    assert told["versions"]["torch"]
    assert told["machine"]["cores"] >= 1


def test_the_table_names_every_row(
    report: TransferBenchReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_transfer_bench(report)
    screen = capsys.readouterr().out
    assert all(row.name in screen for row in MEASURED)


def test_a_plan_too_large_to_write_is_cut_for_its_mesh() -> None:
    planned = plan_large(2, 8, "2x2")
    assert [file.path for file in planned.layout.files] == [
        *(f"__{rank}_0.distcp" for rank in range(4)),
        ".metadata",
    ]
    assert planned.read_bytes == 2 * 8 * 4 * 4096 * 4


def test_a_full_disk_is_refused_with_numbers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(Unsupported, match=r"[\d,]+ bytes of disk are needed, [\d,]+ are free"):
        transfer_bench(None, 10**18, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_says_what_went_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    for kind in ("transfer", "stores"):
        with pytest.raises(SystemExit, match=r"error: .* are free\nhint: a smaller --size"):
            main([kind, "--size", "1000000TB", "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            main([kind, "--repeat", "0"])
        assert "0: at least one round is needed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_command_line_prints_a_table_or_json(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "x.safetensors").write_bytes(ONE_BYTE)
    rows = (Row("once", ("true",)),)
    monkeypatch.setattr(command_line, "transfer_bench", partial(transfer_bench, rows=rows))
    main(["transfer", str(tmp_path / "x.safetensors"), "--out", str(tmp_path), *words])
    shown = capsys.readouterr()
    assert "round 5 of 5: once" in shown.err
    if words:
        assert len(json.loads(shown.out)["rows"][0]["samples"]) == 5
    else:
        assert "once" in shown.out


def test_ratio_is_of_medians_and_spread_of_rounds() -> None:
    def result(*walls: float) -> RowResult:
        return RowResult(Row("a", ()), tuple(Sample(wall, wall, 1) for wall in walls))

    ratio = result(2, 4, 9).against(result(1, 2, 3))
    assert (ratio.value, ratio.lowest, ratio.highest) == (2, 2, 3)


def test_a_sample_is_of_the_command_alone() -> None:
    ballast = bytearray(os.urandom(1) * (200 << 20))
    sample = run_sample((sys.executable, "-c", "pass"))
    assert sample.peak_bytes < len(ballast) // 2


@pytest.mark.parametrize("named", [None, "", ":/x"])
def test_commands_and_what_they_start_import_nothing_of_the_current_folder(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if named is not None:
        monkeypatch.setenv("PYTHONPATH", named)
    starts = (
        f"import subprocess as s; s.run([{sys.executable!r}, '-m', 'json.tool', '-h'], check=1)"
    )
    for words in (["-m", "json.tool", "-h"], ["-c", starts]):
        run_sample([sys.executable, *words])


def test_a_failing_command_says_its_last_words() -> None:
    with pytest.raises(TransferError, match="no such luck"):
        run_sample((sys.executable, "-c", "import sys; sys.exit('no such luck')"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_it_cleans_up(number: signal.Signals, tmp_path: Path) -> None:
    """A signal in mid-run: the command is gone and so is the folder."""
    code = (
        "from functools import partial; from benchmarks import __main__ as command\n"
        "from benchmarks.rows import Row\n"
        "row = Row('sleep', ('sh', '-c', 'touch $0; sleep 600', '{target}'))\n"
        "command.transfer_bench = partial(command.transfer_bench, rows=(row,))\n"
        "command.run()\n"
    )
    source, work = tmp_path / "source.safetensors", tmp_path / "work"
    source.write_bytes(ONE_BYTE)
    work.mkdir()
    words = ["transfer", str(source), "--out", str(work), "--repeat", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    deadline = time.monotonic() + 60
    while not list(work.glob("*/outputs/target")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) != 0
    assert list(work.iterdir()) == []
