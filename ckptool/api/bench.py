"""The benchmarks as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.keywords import Benching
from ckptool.api.options import AnyPath, Keywords, Size, documented
from ckptool.commands.options.bench import BenchOptions
from ckptool.core.options import parse_size
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport, Change
    from ckptool.commands.bench.transfer.run import TransferBenchReport


@documented(Benching)
def bench(
    *,
    progress: Callable[[Mapping[str, Any]], None] = lambda event: None,
    **options: Unpack[Benching],
) -> BenchReport | None:
    """Measure ways to save on this machine: how long each blocks training, until it is durable.

    ``progress`` is told what happens, each a mapping with an ``event``. None on all torchrun
    ranks but the first. Raises UsageError, Unsupported without torch or room, TransferError where
    nothing could be measured.
    """
    from ckptool.commands.bench.run import prepare_bench

    asked = Keywords("bench", options, Benching).options(BenchOptions)
    if asked.like is not None and asked.size is not None:
        raise UsageError("like and size cannot be combined")
    return prepare_bench(asked).run(progress)


def bench_changes(
    report: BenchReport, compare: AnyPath, tolerance: float | str = "10%"
) -> list[Change]:
    """What has changed since the run of which ``compare`` keeps ``ckptool bench --json``.

    ``regressed`` of each says whether it is slower by more than ``tolerance``, or worse. Raises
    NotFound or UsageError where there is no such file, Unsupported where it measured something
    else.
    """
    from ckptool.commands.bench.report import Baseline, parse_tolerance

    baseline, allowed = Baseline.read(Path(compare)), parse_tolerance(str(tolerance))
    baseline.require_comparable(report.settings)
    measured = [result.name for result in report.results]
    return baseline.changes(report, allowed, [*measured, *report.left_out, *report.failed])


def bench_transfer(
    source: AnyPath | None = None,
    *,
    size: Size = "2GB",
    out: AnyPath = ".",
    repeat: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> TransferBenchReport:
    """Measure ckptool's own commands against cp and torch's, on ``source`` or one of ``size``.

    As ``ckptool bench --transfer``. Raises Unsupported where the disk will not hold it.
    """
    from ckptool.commands.bench.transfer.run import transfer_bench

    place = None if source is None else Path(source)
    return transfer_bench(
        place, parse_size(str(size), "size"), Path(out), repeat, progress=progress
    )
