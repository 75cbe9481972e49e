"""The report of save strategies: seconds, advice, the table, bars, JSON, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.bench_samples import FAST, GIB, QUICKEST, SYNC, measured, report
from msgspec.structs import replace
from rich.console import Console

from ckptool.commands.bench.cost import TrainingJob
from ckptool.commands.bench.report import (
    BROKEN,
    CONSISTENT,
    DIRTY,
    AbortResult,
    BenchReport,
    Consistency,
    Difference,
)
from ckptool.commands.bench.words import advice, seconds, slowdown
from ckptool.errors import Unsupported, UsageError
from ckptool.render.bench.bars import draw_bars, require_plottable, write_plot
from ckptool.render.bench.report import show_bench, show_recommended


def test_advice_is_one_sentence_with_all_numbers() -> None:
    assert advice(report(SYNC, FAST, QUICKEST)) == (
        "the fast way blocks 0.50 s per save against 2.00 s for the dcp-sync way;"
        " until durable 4.00 s; steps 20 % slower meanwhile"
    )


def test_advice_where_the_synchronous_save_is_best_or_none_is_consistent() -> None:
    assert advice(report(SYNC)) == "the dcp-sync way blocks 2.00 s per save; until durable 2.50 s"
    assert "no strategy" in advice(report(QUICKEST))


DAILY = TrainingJob(step_time=0.5, mtbf=86400.0)


def test_the_advice_says_what_saving_costs_a_job() -> None:
    """FAST blocks 0.5 s, and slows steps by a fifth for the 3.3 s until it is written."""
    assert advice(report(SYNC, FAST, QUICKEST, training=DAILY)) == (
        "fast (the fast way) costs 0.52 % of training time, 0.88 h a week, with a save every"
        " 7 min 28 s (Daly's best interval); dcp-sync would cost 0.68 %"
    )
    hourly = TrainingJob(step_time=0.5, interval=3600.0)
    assert "costs 0.032 % of training time, 0.054 h a week, with a save every 1 h;" in advice(
        report(SYNC, FAST, training=hourly)
    )
    assert advice(report(FAST, training=TrainingJob(step_time=0.5))) == (
        "fast (the fast way) costs 1.16 s of training per save, 2.32 steps"
    )


LATE = measured("late", 1.0, 2.0, overlapped=(9.0, 0.25, 0.25))


def test_what_blocks_less_if_training_waits_later_is_named_in_the_advice() -> None:
    words = "; late blocks 0.25 s if training waits for its staging only before the next optimizer"
    assert words in advice(report(FAST, LATE))
    assert words in advice(report(FAST, LATE, training=DAILY))
    assert "late" not in advice(report(QUICKEST, measured("sync", 0.2, 1.0), LATE))


def test_both_ways_to_wait_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    screen = shown(report(SYNC, LATE), capsys)
    row = next(line.split() for line in screen.splitlines() if "late" in line)
    assert row[2:6] == ["1.00", "s", "0.25", "s"]
    assert "blocked  overlapped  " in screen
    assert "overlapped: blocked, if training waits for the staging only before its next" in screen
    assert "overlapped" not in shown(report(SYNC), capsys)
    late, sync = json.loads(json.dumps(report(SYNC, LATE).to_dict()))["strategies"]
    assert (late["blocked"]["median"], late["overlapped"]["median"]) == (1.0, 0.25)
    assert sync["overlapped"] is None
    none_lost = report(measured("late", 1.0, 2.0, overlapped=(0.0, 0.0)))
    assert none_lost.to_dict()["strategies"][0]["overlapped"]["bytes_per_second"] is None


def test_what_each_strategy_costs_is_shown_and_in_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(SYNC, FAST, training=DAILY)
    text = shown(found, capsys)
    assert "a save costs" in text
    assert "best interval" in text
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    costs = {row["name"]: row["cost"] for row in told["strategies"]}
    assert told["training"] == {"step_time": 0.5, "interval": None, "mtbf": 86400.0}
    assert costs["fast"]["lost"] < costs["dcp-sync"]["lost"] < 0.01
    assert (told["best"], told["advice"]) == ("fast", advice(found))
    assert "a save costs" not in shown(report(SYNC, FAST), capsys)
    assert report(SYNC).to_dict()["strategies"][0]["cost"] is None


def test_the_recommendation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for training in (TrainingJob(), DAILY):
        show_recommended(report(SYNC, FAST, QUICKEST, training=training))
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("fast")


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0042, "4.2 ms"), (0.034, "34 ms"), (0.0999, "0.10 s"), (3.417, "3.42 s"), (250.4, "250 s")],
)
def test_seconds_are_reported_in_two_or_three_digits(value: float, words: str) -> None:
    assert seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.06, "6 % slower"), (-0.1, "10 % faster"), (0.001, "as fast")]
)
def test_slowdown_in_words(value: float, words: str) -> None:
    assert slowdown(value) == words


def shown(found: BenchReport, capsys: pytest.CaptureFixture[str], *changes: Any) -> str:
    show_bench(found, *changes)
    return capsys.readouterr().out


def test_the_screen_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    left = AbortResult(BROKEN, False, ("sleep 9",), ("psm_1",), ())
    found = report(
        measured("slow", 3, 3, abort=left),
        FAST,
        QUICKEST,
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


def test_on_a_device_all_limits_and_all_memory_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("device_to_host_pinned", "host_to_device_pinned", "host_to_device_registered")
    limits: dict[str, float | None] = dict.fromkeys(names, 2.0 * GIB)
    found = report(
        measured("sync", 1.0, 1.0, device_peak=1, device_used=5 * GIB, pinned=3 * GIB),
        limits=limits,
    )
    screen = shown(replace(found, settings=replace(found.settings, device="cuda")), capsys)
    assert "limits  from the device: pinned 2.00 GiB/s\n" in screen
    assert "        to the device: pinned 2.00 GiB/s, registered 2.00 GiB/s\n" in screen
    assert "+ 3.00 GiB  + 5.00 GiB" in screen
    assert "memory: registered memory is in it, pinned memory is beside it" in screen
    assert "load, of pinned copy" in screen
    row = found.to_dict()["strategies"][0]
    memory = (row["device_memory"], row["device_used"], row["pinned_memory"])
    assert memory == (1, 5 * GIB, 3 * GIB)


def test_one_rank_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(measured("sync", 1.0, 1.0))
    alone = replace(found, settings=replace(found.settings, ranks=1))
    assert "; 1 CPU rank with gloo, no accelerator; first save" in shown(alone, capsys)


def test_bars_tell_their_parts_without_colors(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(measured("half", 1.0, 4.0), measured("sync", 2.0, 2.0, written=(2.0, 2.0, 2.0)))
    lines = [line.split() for line in shown(found, capsys).splitlines()]
    bars = {words[0]: words[1] for words in lines if len(words) > 1 and words[1][0] in "█▓░"}
    assert bars["half"] == 10 * "█" + 28 * "▓" + 2 * "░"
    assert bars["sync"] == 20 * "█"


@pytest.mark.parametrize(("width", "loads"), [(80, False), (100, False), (120, True)])
def test_bars_fit_the_terminal_and_loads_are_beside_them_where_there_is_room(
    width: int, loads: bool
) -> None:
    longest = measured("nvrx/worker-a-save+multi-process", 1.0, 2.0)
    screen = Console(width=width, force_terminal=True)
    lines = [line.plain for line in draw_bars(report(SYNC, longest), screen)]
    assert max(map(len, lines)) <= width
    assert ("load, of memory copy" in lines[1]) == loads
    assert "  nvrx/worker-a-save+multi-process  " in lines[2]


def test_what_is_dirty_unless_training_waits_is_reported_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    staged = Consistency(CONSISTENT, "once staged", (), 9, at_once=4)
    screen = shown(report(measured("late", 1, 2, consistency=staged)), capsys)
    assert "once staged: consistent where training waits for the staging" in screen


def test_what_is_dirty_is_shown_with_its_cause_and_the_first_elements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = Difference("model.w", 1, 3000, 4096, 3000, ((1096, 4000), (4000, 4096)))
    found = Consistency(DIRTY, "once staged", ("model.w",), 9, cause="it", differences=(first,))
    screen = shown(report(SYNC, measured("early", 1, 2, consistency=found)), capsys)
    where = "first model.w on rank 1, elements 1,096:4,000, 4,000:4,096 of 4,096"
    assert f"DIRTY: early: it; {where}" in screen


def test_json_holds_every_sample_and_both_fractions() -> None:
    told = json.loads(json.dumps(report(SYNC, FAST, QUICKEST).to_dict()))
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
    write_plot(report(SYNC, FAST, QUICKEST), path)
    assert path.read_bytes().startswith(magic)


def test_a_picture_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        require_plottable(tmp_path / "bars.jpg")
    (tmp_path / "file").touch()
    with pytest.raises(Unsupported, match="cannot be made"):
        require_plottable(tmp_path / "file" / "bars.png")


def test_saves_to_a_store_are_measured_against_uploads(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(FAST, limits={"memory_copy": 9.0, "write": None, "upload": 0.5 * GIB})
    assert found.fraction("durable", FAST) == pytest.approx(0.5)
    screen = shown(found, capsys)
    assert "raw upload 512 MiB/s" in screen
    assert "of raw upload" in screen
    assert "raw write" not in screen
