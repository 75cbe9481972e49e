"""What saving costs of training time, and how often to save: Young's and Daly's intervals.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from msgspec import Struct

from ckptool.errors import UsageError

HOURS_A_WEEK = 168.0
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "ms": 0.001}
_NUMBER = r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*"


class Interval(NamedTuple):
    """A time in seconds, or a number of steps."""

    value: float
    in_steps: bool = False


def parse_duration(value: object, name: str) -> float:
    """Return the seconds of ``90``, ``0.4s``, ``15min`` or ``2h``; UsageError if invalid."""
    match = re.fullmatch(_NUMBER + "([a-z]*)", str(value))
    unit = _UNITS.get(match[2] or "s") if match else None
    seconds = float(match[1]) * unit if match and unit else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"invalid {name} {str(value)!r}: not a time", hint="such as 0.4s, 15min, 2h or 1d"
        )
    return seconds


def parse_interval(value: object, name: str) -> Interval:
    """Return a time, or the steps of ``500steps``; UsageError if it is neither."""
    match = re.fullmatch(_NUMBER + "steps?", str(value))
    if match and 0 < float(match[1]) < math.inf:
        return Interval(float(match[1]), in_steps=True)
    return Interval(parse_duration(value, name))


class TrainingJob(Struct, frozen=True):
    """The described job, as far as it is known; times in seconds.

    ``interval`` is from the start of a save to the next, ``mtbf`` the mean time between failures.
    """

    step_time: float | None = None
    interval: float | None = None
    mtbf: float | None = None

    @classmethod
    def of(
        cls, step_time: float | None, interval: Interval | None, mtbf: float | None
    ) -> TrainingJob:
        """Return the job that options describe; UsageError for steps of unknown length."""
        if interval is None or not interval.in_steps:
            return cls(step_time, interval and interval.value, mtbf)
        if step_time is None:
            raise UsageError("--interval in steps needs --step-time")
        return cls(step_time, interval.value * step_time, mtbf)

    @property
    def is_known(self) -> bool:
        """Return whether anything is known."""
        return (self.step_time, self.interval, self.mtbf) != (None, None, None)


UNKNOWN = TrainingJob()
"""A job of which nothing is known."""


class Cost(Struct, frozen=True):
    """The cost of a strategy; seconds, and shares of all time.

    ``save`` is the training time that one save costs, including slower steps beside it, in
    ``steps`` if the length of one is known. ``young`` and ``daly`` are the best intervals,
    ``interval`` is the one that the shares are for: as requested, or Daly's, and never shorter than
    a save. ``saving`` is the share of time in saves, ``redone`` the share lost in failures,
    ``lost`` both, and ``hours_a_week`` the same in hours.
    """

    save: float
    steps: float | None = None
    young: float | None = None
    daly: float | None = None
    interval: float | None = None
    saving: float | None = None
    redone: float | None = None
    lost: float | None = None
    hours_a_week: float | None = None


def cost_of(
    training: TrainingJob, *, blocked: float, written: float, durable: float, slowdown: float | None
) -> Cost:
    """Return the cost of a strategy for a job; without an interval and a failure rate, of a save.

    After a failure the newest durable checkpoint is on average half an interval old, plus the time
    that a save needs to become durable.
    """
    save = blocked + max(0.0, slowdown or 0.0) * max(0.0, written - blocked)
    steps = None if training.step_time is None else save / training.step_time
    young = daly = None
    if training.mtbf is not None:
        young = math.sqrt(2 * save * training.mtbf)
        daly = _daly(save, training.mtbf)
    interval = training.interval if training.interval is not None else daly
    if interval is None:
        return Cost(save, steps)
    interval = max(interval, written, blocked)
    saving = min(1.0, save / interval)
    redone = None if training.mtbf is None else min(1.0, (interval / 2 + durable) / training.mtbf)
    loss = min(1.0, saving + (redone or 0.0))
    return Cost(save, steps, young, daly, interval, saving, redone, loss, loss * HOURS_A_WEEK)


def _daly(save: float, mtbf: float) -> float:
    """Return Daly's interval from the start of a save to the next: his, plus the save itself."""
    if save >= 2 * mtbf:
        return mtbf + save
    share = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(share) / 3 + share / 9)
