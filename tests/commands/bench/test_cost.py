"""What saving costs of training time, beside figures computed by hand and by simulation."""

from __future__ import annotations

import math
import random

import pytest
from bench.bench_samples import FAST, QUICKEST, SYNC, measured, report

from ckptool.commands.bench.cost import (
    HOURS_A_WEEK,
    Cost,
    Interval,
    TrainingJob,
    cost_of,
    parse_duration,
    parse_interval,
)
from ckptool.errors import UsageError


def cost(training: TrainingJob, blocked: float = 10.0, **more: float | None) -> Cost:
    facts: dict[str, float | None] = {"written": blocked, "durable": blocked, "slowdown": None}
    return cost_of(training, blocked=blocked, **{**facts, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        (90, 90),
        ("0.4s", 0.4),
        ("250ms", 0.25),
        ("15min", 900),
        ("2h", 7200),
        ("1d", 86400),
    ],
)
def test_times(text: object, seconds: float) -> None:
    assert parse_duration(text, "--mtbf") == seconds
    assert parse_interval(text, "--interval") == Interval(seconds)


@pytest.mark.parametrize(
    "text", ["", "fast", "-3", "0", "0steps", "3 weeks", "nan", "1e999", f"{'9' * 400}steps"]
)
def test_no_times(text: str) -> None:
    with pytest.raises(UsageError, match="invalid --mtbf"):
        parse_duration(text, "--mtbf")
    with pytest.raises(UsageError, match="invalid --interval"):
        parse_interval(text, "--interval")


def test_an_interval_in_steps_needs_their_length() -> None:
    steps = parse_interval("500steps", "--interval")
    assert TrainingJob.of(0.5, steps, None).interval == 250
    with pytest.raises(UsageError, match="needs --step-time"):
        TrainingJob.of(None, steps, None)


def test_what_a_save_costs_and_what_share_that_is() -> None:
    """10 s blocked, then 20 s in which steps are half as fast again: 20 s in 1,000."""
    found = cost(TrainingJob(2.0, 1000.0), written=30, durable=40, slowdown=0.5)
    assert (found.save, found.steps, found.interval) == (20, 10, 1000)
    assert (found.saving, found.redone, found.lost) == (0.02, None, 0.02)
    assert found.hours_a_week == pytest.approx(0.02 * HOURS_A_WEEK)
    assert (found.young, found.daly) == (None, None)
    assert cost(TrainingJob(2.0)) == Cost(10, 5)
    assert cost(TrainingJob(interval=1000), written=30, slowdown=-0.1).save == 10


def test_no_save_begins_before_the_last_one_is_written() -> None:
    found = cost(TrainingJob(interval=5), blocked=1, written=60)
    assert (found.interval, found.saving) == (60, 1 / 60)
    assert cost(TrainingJob(mtbf=100), blocked=0.001, written=60).interval == 60


def test_young_and_daly() -> None:
    """The figures of a save of 5 minutes and a failure a day."""
    found = cost(TrainingJob(mtbf=86400), blocked=300)
    assert found.young == pytest.approx(math.sqrt(2 * 300 * 86400))
    share = 300 / (2 * 86400)
    expected = math.sqrt(2 * 300 * 86400) * (1 + math.sqrt(share) / 3 + share / 9)
    assert found.daly == found.interval == pytest.approx(expected)
    assert cost(TrainingJob(mtbf=10), blocked=300).daly == 310


def simulate(interval: float, save: float, mtbf: float, hours: float) -> float:
    """Return the share of time lost by a job that saves and fails; nothing restarts slowly."""
    generator = random.Random(5)
    clock = done = kept = 0.0
    failure = generator.expovariate(1 / mtbf)
    while clock < hours * 3600:
        if clock + interval < failure:
            clock += interval
            done += interval - save
            kept = done
            continue
        clock, done = failure, kept
        failure = clock + generator.expovariate(1 / mtbf)
    return 1 - kept / clock


def test_the_share_lost_is_that_of_a_simulated_job() -> None:
    """And none is lost less than with Daly's interval, by much."""
    training = TrainingJob(mtbf=3600.0)
    best = cost(training, blocked=20)
    assert best.daly is not None
    assert best.lost is not None
    assert simulate(best.daly, 20, 3600, 40_000) == pytest.approx(best.lost, rel=0.15)
    for factor in (0.3, 3.0):
        other = simulate(best.daly * factor, 20, 3600, 40_000)
        assert other > simulate(best.daly, 20, 3600, 40_000)


def test_the_best_strategy_is_the_one_that_loses_least() -> None:
    """One that blocks least may take so long that failures cost more; a dirty one is never best."""
    slow = measured("slow", 0.4, 3000.0)
    plain = report(SYNC, FAST, QUICKEST, slow)
    assert plain.best is slow
    failing = report(SYNC, FAST, QUICKEST, slow, training=TrainingJob(mtbf=7200.0))
    assert failing.best is FAST
    assert failing.loss_of(SYNC) > failing.loss_of(FAST)
