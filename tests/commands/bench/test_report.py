"""What a report comes to: medians, fractions of the limits, the best, regressions."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer
from bench.bench_samples import FAST, GIB, QUICKEST, SYNC, dirty, measured, report

import ckptool
from ckptool.cli.bench import _measure, _show
from ckptool.commands.bench.baseline import Baseline
from ckptool.commands.options import SHARE
from ckptool.commands.options.bench import BenchCommand
from ckptool.commands.options.screen import Screen
from ckptool.errors import CkptoolError, NotFound, Unsupported, UsageError

# Numbers


def test_the_first_save_is_apart_from_the_steady_ones() -> None:
    assert (SYNC.blocked[0], SYNC.blocked_median, SYNC.durable_median) == (6.0, 2.0, 2.5)


def test_strategies_are_sorted_by_blocked_time_and_the_best_is_consistent() -> None:
    found = report(SYNC, QUICKEST, FAST)
    assert [result.name for result in found.ranked] == ["quickest", "fast", "dcp-sync"]
    assert found.best is FAST


def test_of_those_that_block_as_long_the_best_is_durable_first() -> None:
    slow, soon = measured("slow", 0.56, 5.2), measured("soon", 0.57, 1.9)
    assert report(slow, soon, measured("sooner", 0.7, 1.0)).best is soon


def test_rates_are_fractions_of_what_the_hardware_can_do() -> None:
    found = report(FAST)
    assert found.fraction("blocked", FAST) == pytest.approx(0.2)
    assert found.fraction("durable", FAST) == pytest.approx(0.25)


def test_staging_is_measured_against_pinned_copies_where_there_are_such() -> None:
    limits = {"memory_copy": 9.0, "write": None, "device_to_host_pinned": 4.0 * GIB}
    found = report(FAST, limits=limits)
    assert found.fraction("blocked", FAST) == pytest.approx(0.5)
    assert found.fraction("durable", FAST) is None


def test_a_load_is_a_fraction_of_copies_to_the_device() -> None:
    assert report(FAST).fraction("loaded", FAST) == pytest.approx(0.1)
    found = report(FAST, limits={"memory_copy": 9.0, "host_to_device_pinned": 2.0 * GIB})
    assert found.fraction("loaded", FAST) == pytest.approx(0.5)
    assert found.fraction("loaded", measured("never", 1, 1, loaded=())) is None
    (row,) = found.to_dict()["strategies"]
    assert (row["loaded"]["median"], row["loaded"]["of_limit"]) == (1.0, pytest.approx(0.5))


def test_the_slowdown_is_of_median_steps_beside_steady_saves() -> None:
    assert FAST.slowdown == pytest.approx(0.2)
    assert SYNC.slowdown is None


# Against an earlier run


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(report(SYNC, FAST).to_dict()))
    return path


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
    changes = Baseline.read(old).changes(now, 0.10)
    assert {change.value for change in changes if change.regressed} == regressed
    assert {change.name for change in changes if change.regressed} <= {"fast"}
    assert ckptool.bench_changes(now, old) == changes


def test_what_is_dirty_or_fails_now_is_a_regression(old: Path) -> None:
    baseline = Baseline.read(old)
    now = report(measured("fast", 0.5, 4.0, consistency=dirty("w")), failed={"dcp-sync": "boom"})
    bad = {c.name: c.why for c in baseline.changes(now, 0.1) if c.regressed}
    assert bad == {"dcp-sync": "boom", "fast": "DIRTY"}


def test_what_was_not_asked_for_now_is_not_compared(old: Path) -> None:
    assert {c.name for c in Baseline.read(old).changes(report(FAST), 0.1)} == {"fast"}


def test_another_size_is_not_compared(old: Path) -> None:
    baseline = Baseline.read(old)
    baseline.require_comparable(report(SYNC).settings, ["fast"])
    other = Baseline(baseline.path, {**baseline.settings, "ranks": 8}, {}, frozenset())
    with pytest.raises(Unsupported, match="ranks 8, this run has 2"):
        other.require_comparable(report(SYNC).settings, ["fast"])


def test_other_strategies_alone_are_not_compared(old: Path) -> None:
    """Else nothing would be slower, as nothing is compared."""
    with pytest.raises(Unsupported, match="has none of nvrx, but fast, dcp-sync"):
        Baseline.read(old).require_comparable(report(SYNC).settings, ["nvrx"])
    with pytest.raises(Unsupported, match="has none of nvrx"):
        ckptool.bench_changes(report(measured("nvrx", 0.5, 4.0)), old)


def test_a_tolerance_is_for_an_earlier_run() -> None:
    with pytest.raises(UsageError, match="needs --compare OLD"):
        _measure(BenchCommand(tolerance=0.2), quiet=True)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, NotFound),
        ("{", UsageError),
        ("[" * 100_000, UsageError),
        ("[]", UsageError),
        ('{"schema": "ckptool.convert/2"}', UsageError),
        ('{"schema": "ckptool.bench/2", "strategies": [{}], "settings": {}}', UsageError),
    ],
)
def test_what_is_not_an_earlier_run_is_refused(
    content: str | None, error: type[CkptoolError], tmp_path: Path
) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=r"old\.json"):
        Baseline.read(path)


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.25", 0.25), (" 0 % ", 0.0)])
def test_tolerance(text: str, value: float) -> None:
    assert SHARE.parse(text, "--tolerance") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "ten", "-1%", "nan", "inf"])
def test_no_tolerance(text: str) -> None:
    with pytest.raises(UsageError, match="not a fraction"):
        SHARE.parse(text, "--tolerance")


@pytest.mark.parametrize(("blocked", "code"), [(0.5, 0), (0.6, 1)])
def test_a_regression_ends_the_command_with_1(
    blocked: float, code: int, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = report(SYNC, measured("fast", blocked, 4.0))
    changes = Baseline.read(old).changes(now, 0.1)
    with pytest.raises(typer.Exit) if code else nullcontext() as ended:
        _show(now, changes, BenchCommand(), Screen(), None)
    assert ended is None or ended.value.exit_code == code
    screen = capsys.readouterr().out
    assert ("regression: fast: blocked 0.60 s, was 0.50 s (+20%)" in screen) is bool(code)
    assert ("no regression in 4 values" in screen) is not (code == 1)
