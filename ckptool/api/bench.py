"""The benchmark of ways to save, as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, with_keywords
from ckptool.api.keywords import BenchKeywords
from ckptool.commands.options import SHARE
from ckptool.commands.options.bench import BenchOptions

if TYPE_CHECKING:
    from ckptool.commands.bench.baseline import Change
    from ckptool.commands.bench.report import BenchReport


@with_keywords(BenchKeywords)
def bench(
    *,
    progress: Callable[[Mapping[str, Any]], None] = lambda event: None,
    **options: Unpack[BenchKeywords],
) -> BenchReport | None:
    """Measure ways to save on this machine: how long each blocks training, and when it is durable.

    ``progress`` is called with each event, a mapping with the key ``event``. Returns None on all
    torchrun ranks but the first. Raises UsageError, Unsupported if torch or disk space is missing,
    TransferError if nothing could be measured.
    """
    from ckptool.commands.bench.run import prepare_bench

    parsed = Keywords("bench", options, BenchKeywords).options(BenchOptions)
    return prepare_bench(parsed).run(progress)


def bench_changes(
    report: BenchReport, compare: AnyPath, tolerance: float | str = "10%"
) -> list[Change]:
    """Compare a report with an earlier run: ``compare`` is a file of ``ckptool bench --json``.

    ``regressed`` of each change is true if it is slower by more than ``tolerance``, or worse.
    Raises NotFound or UsageError if there is no such file, Unsupported if it measured something
    else.
    """
    from ckptool.commands.bench.baseline import Baseline

    baseline = Baseline.read(Path(compare))
    allowed = SHARE.parse(tolerance, "tolerance")
    names = [*(result.name for result in report.results), *report.skipped, *report.failed]
    baseline.require_comparable(report.settings, names)
    return baseline.changes(report, allowed)
