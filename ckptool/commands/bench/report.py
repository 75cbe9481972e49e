"""The report of a benchmark of save strategies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from ckptool.commands.bench.cost import UNKNOWN, Cost, TrainingJob, cost_of
from ckptool.commands.bench.words import advice
from ckptool.commands.document import Report, document

_Sample = TypeVar("_Sample")
_AS_SHORT = 1.1
"""Times as long as another is a blocked time that is as short: runs of one strategy differ more."""

Limits = Mapping[str, float | None]
"""``memory_copy``, ``write`` (to disk), ``upload`` (to a store), ``device_to_host_`` and
``host_to_device_``, each with ``pageable``, ``pinned`` and ``registered`` memory: bytes a second of
all ranks together; None if there is no such."""

_BOUND_BY = {
    "blocked": ("device_to_host_pinned", "memory_copy"),
    "overlapped": (),
    "written": (),
    "durable": ("write", "upload"),
    "loaded": ("host_to_device_pinned", "memory_copy"),
}
"""The times of a strategy, and what bounds each: the first of its limits that was measured.

State leaves the device and reaches it as fast as pinned memory is copied; that of CPU ranks, as
fast as any memory.
"""


class Settings(Struct, frozen=True):
    """What was asked for. ``nbytes`` is the state of all ranks together."""

    source: str
    nbytes: int
    tensors: int
    ranks: int
    device: str
    repeat: int
    folder: str
    abort: bool


CONSISTENT, DIRTY = "consistent", "DIRTY"

NOTHING = "nothing there"
UNFINISHED = "does not pass"
WHOLE = "passes, whole"
BROKEN = "PASSES, NOT WHOLE"


class Difference(Struct, frozen=True):
    """What of a saved tensor is not as at the call: ``elements`` of its ``of`` on a rank.

    ``changed`` of them are as the parameters were changed to, the others as in neither state.
    ``ranges`` are the first of them in the flattened shard, each from its first element to the one
    after its last.
    """

    tensor: str
    rank: int
    elements: int
    of: int
    changed: int
    ranges: tuple[tuple[int, int], ...]


class Consistency(Struct, frozen=True):
    """What a finished checkpoint held whose parameters were changed during the save.

    ``changed`` says when: ``after the call`` returned, or ``once staged`` where the library wants
    that awaited. ``tensors`` are those that were not as at the call, of ``of`` in all. For a
    strategy that wants it awaited, ``at_once`` tells how many are dirty without. ``cause`` says
    what the elements tell of how that came, ``differences`` the first of them.
    """

    verdict: str
    changed: str
    tensors: tuple[str, ...]
    of: int
    at_once: int | None = None
    cause: str | None = None
    differences: tuple[Difference, ...] = ()


class AbortResult(Struct, frozen=True):
    """What is there once the loop is killed. ``folder`` is one of the verdicts above.

    ``finished``: the save was over before the kill. ``processes`` are command lines, ``shared``
    names in /dev/shm, ``files`` paths of temporary files.
    """

    folder: str
    finished: bool
    processes: tuple[str, ...]
    shared: tuple[str, ...]
    files: tuple[str, ...]


class Measured(Struct, frozen=True):
    """One strategy. Seconds a save and seconds a step; the first save is apart from the others.

    ``during`` has the steps beside each save. ``blocked`` is for training that waits for the
    staging at once, ``overlapped`` for training that waits only before its next optimizer step;
    None where there is nothing to wait for.

    A value of a save is that of the slowest rank. ``host_base`` is the memory (PSS) of the rank and
    its children before the first save, ``host_peak`` the most of any rank since: registered memory
    is in it, pinned memory is not, and is ``pinned``, as far as torch's allocator has it. Beyond
    what training has, the rank's own process allocates ``device_peak`` on its device, and all
    processes use ``device_used``, with their contexts. None where that cannot be told.
    """

    name: str
    says: str
    library: str
    blocked: tuple[float, ...]
    written: tuple[float, ...]
    durable: tuple[float, ...]
    before: tuple[float, ...]
    during: tuple[tuple[float, ...], ...]
    after: tuple[float, ...]
    host_base: int
    host_peak: int
    device_peak: int
    nbytes: int
    files: int
    consistency: Consistency
    abort: AbortResult | None
    remark: str | None
    overlapped: tuple[float, ...] | None = None
    loaded: tuple[float, ...] = ()
    device_used: int | None = None
    pinned: int | None = None

    @property
    def blocked_median(self) -> float:
        """Seconds that training is blocked by a steady save."""
        return statistics.median(steady(self.blocked))

    @property
    def overlapped_median(self) -> float | None:
        """Seconds that a steady save costs training that waits only before its optimizer step."""
        return None if self.overlapped is None else statistics.median(steady(self.overlapped))

    @property
    def written_median(self) -> float:
        """Seconds from the call of a steady save until the library holds it for written."""
        return statistics.median(steady(self.written))

    @property
    def durable_median(self) -> float:
        """Seconds from the call of a steady save until its bytes are safe."""
        return statistics.median(steady(self.durable))

    @property
    def slowdown(self) -> float | None:
        """How much longer a step takes beside a steady save: 0.06 is 6 %; None if none ran."""
        steps = [seconds for save in steady(self.during) for seconds in save]
        if not steps:
            return None
        return statistics.median(steps) / statistics.median(self.before) - 1

    @property
    def is_consistent(self) -> bool:
        return self.consistency.verdict == CONSISTENT

    @property
    def host_extra(self) -> int:
        """Bytes of host memory that saving takes of a rank, above what training has."""
        return max(0, self.host_peak - self.host_base)


def steady(samples: Sequence[_Sample]) -> Sequence[_Sample]:
    """Return the samples without the first, which also starts processes and makes buffers."""
    return samples[1:] or samples


class BenchReport(Report, frozen=True):
    """All that was measured, where, and what could not be, with the reasons.

    It is true where a strategy saved what it should.
    """

    settings: Settings
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    limits: Limits
    results: tuple[Measured, ...]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]
    training: TrainingJob = UNKNOWN

    schema: ClassVar = "bench"

    @property
    def ok(self) -> bool:
        return self.best is not None

    def to_dict(self) -> dict[str, Any]:
        """Return everything with every sample: seconds, bytes, bytes a second."""
        return document(
            self.schema,
            machine=self.machine,
            versions=self.versions,
            settings=asdict(self.settings),
            training=self.training,
            limits=self.limits,
            strategies=[_strategy(self, result) for result in self.ranked],
            skipped=self.skipped,
            failed=self.failed,
            best=self.best.name if self.best else None,
            advice=advice(self),
        )

    def _short(self) -> dict[str, Any]:
        return {"ok": self.ok, "advice": advice(self)}

    @property
    def ranked(self) -> list[Measured]:
        """The strategies by the time that they block."""
        return sorted(self.results, key=lambda result: result.blocked_median)

    @property
    def best(self) -> Measured | None:
        """The consistent strategy that costs least of training time, as far as that is known.

        If only blocked times are, it is the one durable first among those that block the shortest.
        """
        consistent = [result for result in self.ranked if result.is_consistent]
        least = min(map(self.loss_of, consistent), default=0.0)
        most = least if self.training.is_known else _AS_SHORT * least
        candidates = [result for result in consistent if self.loss_of(result) <= most]
        return min(candidates, key=lambda result: result.durable_median, default=None)

    def cost(self, result: Measured) -> Cost:
        """Return what a strategy costs the job that was described."""
        return cost_of(
            self.training,
            blocked=result.blocked_median,
            written=result.written_median,
            durable=result.durable_median,
            slowdown=result.slowdown,
        )

    def loss_of(self, result: Measured) -> float:
        """Return the share of time that is lost, or what a save costs, or blocks, in seconds."""
        if not self.training.is_known:
            return result.blocked_median
        cost = self.cost(result)
        return cost.save if cost.lost is None else cost.lost

    def limit(self, time: str) -> float | None:
        """Return the most bytes a second that the hardware can do in a time; None if unmeasured."""
        return next(filter(None, map(self.limits.get, _BOUND_BY[time])), None)

    def fraction(self, time: str, result: Measured) -> float | None:
        """Return the rate of a strategy in a time, as a part of the time's limit."""
        limit, samples = self.limit(time), getattr(result, time)
        seconds = statistics.median(steady(samples)) if samples else 0.0
        return self.settings.nbytes / seconds / limit if limit and seconds else None


def _strategy(report: BenchReport, result: Measured) -> dict[str, Any]:
    return {
        "name": result.name,
        "library": result.library,
        "cost": report.cost(result) if report.training.is_known else None,
        **{time: _samples(report, time, result) for time in _BOUND_BY},
        "steps": {
            "before": result.before,
            "during": result.during,
            "after": result.after,
            "slowdown": result.slowdown,
        },
        "host_memory": {
            "base": result.host_base,
            "peak": result.host_peak,
            "extra": result.host_extra,
        },
        "device_memory": result.device_peak,
        "device_used": result.device_used,
        "pinned_memory": result.pinned,
        "disk": {"bytes": result.nbytes, "files": result.files},
        "consistency": result.consistency,
        "abort": result.abort,
        "remark": result.remark,
    }


def _samples(report: BenchReport, time: str, result: Measured) -> dict[str, Any] | None:
    """Describe samples; ``median``, ``lowest`` and ``highest`` are without the first."""
    samples = getattr(result, time)
    if not samples:
        return None
    rest = steady(samples)
    median = statistics.median(rest)
    return {
        "first": samples[0],
        "median": median,
        "lowest": min(rest),
        "highest": max(rest),
        "bytes_per_second": report.settings.nbytes / median if median else None,
        "of_limit": report.fraction(time, result),
        "samples": samples,
    }
