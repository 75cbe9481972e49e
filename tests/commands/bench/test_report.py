"""What a report comes to: medians, fractions of the limits, the best, advice, regressions."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_samples import GIB, dirty, measured, report

import ckptool
from ckptool.cli.bench import _show
from ckptool.commands.bench.report import (
    BROKEN,
    CONSISTENT,
    AbortResult,
    Baseline,
    BenchReport,
    Consistency,
    parse_tolerance,
)
from ckptool.errors import CkptoolError, NotFound, Unsupported, UsageError
from ckptool.render.bench.bars import require_plottable, seconds, write_plot
from ckptool.render.bench.report import advice, bench_json, show_bench, slowdown

SYNC = measured("dcp-sync", 2.0, 2.5)
FAST = measured("fast", 0.5, 4.0, during=((9.0, 9.0, 9.0), (0.12, 0.2), (0.12,)))
DIRTY = measured("quickest", 0.1, 1.0, consistency=dirty("model.w"))


# Numbers


def test_the_first_save_is_apart_from_the_steady_ones() -> None:
    assert (SYNC.blocked[0], SYNC.blocked_median, SYNC.durable_median) == (6.0, 2.0, 2.5)


def test_strategies_are_sorted_by_blocked_time_and_the_best_is_consistent() -> None:
    found = report(SYNC, DIRTY, FAST)
    assert [result.name for result in found.ranked] == ["quickest", "fast", "dcp-sync"]
    assert found.best is FAST


def test_rates_are_fractions_of_what_the_hardware_can_do() -> None:
    found = report(FAST)
    assert found.blocked_fraction(FAST) == pytest.approx(0.2)
    assert found.durable_fraction(FAST) == pytest.approx(0.25)


def test_staging_is_measured_against_pinned_copies_where_there_are_such() -> None:
    limits = {"memory_copy": 9.0, "write": None, "device_to_host_pinned": 4.0 * GIB}
    found = report(FAST, limits=limits)
    assert found.blocked_fraction(FAST) == pytest.approx(0.5)
    assert found.durable_fraction(FAST) is None


def test_saves_to_a_store_are_measured_against_uploads(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(FAST, limits={"memory_copy": 9.0, "write": None, "upload": 0.5 * GIB})
    assert found.durable_fraction(FAST) == pytest.approx(0.5)
    screen = shown(found, capsys)
    assert "raw upload 512 MiB/s" in screen
    assert "of raw upload" in screen
    assert "raw write" not in screen


def test_the_slowdown_is_of_median_steps_beside_steady_saves() -> None:
    assert FAST.slowdown == pytest.approx(0.2)
    assert SYNC.slowdown is None


# Words


def test_advice_is_one_sentence_with_all_numbers() -> None:
    assert advice(report(SYNC, FAST, DIRTY)) == (
        "the fast way blocks 0.50 s per save against 2.00 s for the dcp-sync way;"
        " until durable 4.00 s; steps 20 % slower meanwhile"
    )


def test_advice_where_the_synchronous_save_is_best_or_none_is_consistent() -> None:
    assert advice(report(SYNC)) == "the dcp-sync way blocks 2.00 s per save; until durable 2.50 s"
    assert "no strategy" in advice(report(DIRTY))


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0042, "4.2 ms"), (0.034, "34 ms"), (0.0999, "0.10 s"), (3.417, "3.42 s"), (250.4, "250 s")],
)
def test_seconds_are_said_in_two_or_three_digits(value: float, words: str) -> None:
    assert seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.06, "6 % slower"), (-0.1, "10 % faster"), (0.001, "as fast")]
)
def test_slowdown_in_words(value: float, words: str) -> None:
    assert slowdown(value) == words


# What is shown


def shown(found: BenchReport, capsys: pytest.CaptureFixture[str], *changes: Any) -> str:
    show_bench(found, *changes)
    return capsys.readouterr().out


def test_the_screen_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    left = AbortResult(BROKEN, False, ("sleep 9",), ("psm_1",), ())
    found = report(
        measured("slow", 3, 3, abort=left),
        FAST,
        DIRTY,
        aborted=True,
        skipped={"nvrx": "not installed"},
        failed={"direct": "rank 0: OSError"},
    )
    screen = shown(found, capsys)
    assert "▸ fast" in screen
    assert "DIRTY 1 of 9" in screen
    assert "PASSES, NOT WHOLE" in screen
    assert "1: sleep 9" in screen
    assert "skipped: nvrx: not installed" in screen
    assert "failed: direct: rank 0: OSError" in screen
    assert "2 CPU ranks with gloo, no accelerator" in screen
    assert advice(found) in screen


def test_bars_tell_their_parts_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(measured("half", 1.0, 4.0), measured("sync", 2.0, 2.0, written=(2.0, 2.0, 2.0)))
    lines = [line.split() for line in shown(found, capsys).splitlines()]
    bars = {words[0]: words[1] for words in lines if len(words) > 1 and words[1][0] in "█▓░"}
    assert bars["half"] == 10 * "█" + 28 * "▓" + 2 * "░"
    assert bars["sync"] == 20 * "█"


def test_what_is_dirty_unless_training_waits_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    staged = Consistency(CONSISTENT, "once staged", (), 9, at_once=4)
    screen = shown(report(measured("late", 1, 2, consistency=staged)), capsys)
    assert "once staged: consistent where training waits for the staging" in screen


def test_json_holds_every_sample_and_both_fractions() -> None:
    told = json.loads(json.dumps(bench_json(report(SYNC, FAST, DIRTY))))
    assert told["schema"] == "ckptool.bench/2"
    assert told["best"] == "fast"
    fast = told["strategies"][1]
    assert fast["blocked"]["samples"] == [1.5, 0.5, 0.5]
    assert fast["blocked"]["first"] == 1.5
    assert fast["blocked"]["median"] == 0.5
    assert fast["blocked"]["bytes_per_second"] == 2 * GIB
    assert fast["durable"]["of_limit"] == pytest.approx(0.25)
    assert told["strategies"][0]["consistency"]["tensors"] == ["model.w"]


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_picture_is_drawn(suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"bars{suffix}"
    require_plottable(path)
    write_plot(report(SYNC, FAST, DIRTY), path)
    assert path.read_bytes().startswith(magic)


def test_a_picture_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        require_plottable(tmp_path / "bars.jpg")
    with pytest.raises(Unsupported, match="no such folder"):
        require_plottable(tmp_path / "none" / "bars.png")


# Against an earlier run


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(bench_json(report(SYNC, FAST))))
    return path


ALL = ["dcp-sync", "fast"]


@pytest.mark.parametrize(
    ("blocked", "durable", "regressed"),
    [
        (0.5, 4.0, set()),
        (0.54, 4.3, set()),
        (0.3, 2.0, set()),
        (0.56, 4.0, {"blocked"}),
        (0.5, 4.5, {"durable"}),
        (0.6, 5.0, {"blocked", "durable"}),
    ],
)
def test_what_is_slower_than_allowed_is_a_regression(
    blocked: float, durable: float, regressed: set[str], old: Path
) -> None:
    now = report(SYNC, measured("fast", blocked, durable))
    changes = Baseline.read(old).changes(now, 0.10, ALL)
    assert {change.value for change in changes if change.regressed} == regressed
    assert {change.name for change in changes if change.regressed} <= {"fast"}
    assert ckptool.bench_changes(now, old) == changes


def test_what_is_dirty_or_fails_now_is_a_regression(old: Path) -> None:
    baseline = Baseline.read(old)
    now = report(measured("fast", 0.5, 4.0, consistency=dirty("w")), failed={"dcp-sync": "boom"})
    bad = {c.name: c.why for c in baseline.changes(now, 0.1, ALL) if c.regressed}
    assert bad == {"dcp-sync": "boom", "fast": "DIRTY"}


def test_what_was_not_asked_for_now_is_not_compared(old: Path) -> None:
    assert {c.name for c in Baseline.read(old).changes(report(FAST), 0.1, ["fast"])} == {"fast"}


def test_another_size_is_not_compared(old: Path) -> None:
    baseline = Baseline.read(old)
    baseline.require_comparable(report(SYNC).settings)
    other = Baseline(baseline.path, {**baseline.settings, "ranks": 8}, {}, frozenset())
    with pytest.raises(Unsupported, match="ranks 8, this run has 2"):
        other.require_comparable(report(SYNC).settings)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, NotFound),
        ("{", UsageError),
        ("[]", UsageError),
        ('{"schema": "ckptool.convert/2"}', UsageError),
        ('{"schema": "ckptool.bench/2", "strategies": [{}], "settings": {}}', UsageError),
    ],
)
def test_what_is_no_earlier_run_is_refused(
    content: str | None, error: type[CkptoolError], tmp_path: Path
) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=r"old\.json"):
        Baseline.read(path)


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.25", 0.25), (" 0 % ", 0.0)])
def test_tolerance(text: str, value: float) -> None:
    assert parse_tolerance(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "ten", "-1%", "nan", "inf"])
def test_no_tolerance(text: str) -> None:
    with pytest.raises(UsageError, match="not a fraction"):
        parse_tolerance(text)


@pytest.mark.parametrize(("blocked", "code"), [(0.5, 0), (0.6, 1)])
def test_a_regression_ends_the_command_with_1(
    blocked: float, code: int, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = report(SYNC, measured("fast", blocked, 4.0))
    changes = Baseline.read(old).changes(now, 0.1, ALL)
    with pytest.raises(typer.Exit) if code else nullcontext() as ended:
        _show(now, changes, None, as_json=False)
    assert ended is None or ended.value.exit_code == code
    screen = capsys.readouterr().out
    assert ("regression: fast: blocked 0.60 s, was 0.50 s (+20%)" in screen) is bool(code)
    assert ("no regression in 4 values" in screen) is not (code == 1)
