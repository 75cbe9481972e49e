"""Benchmarks as functions: ways to save, and ckptool's own commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, Size, with_keywords
from ckptool.api.keywords import BenchKeywords
from ckptool.commands.options.bench import BenchOptions
from ckptool.core.options import parse_size
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport, Change
    from ckptool.commands.bench.transfer.report import TransferBenchReport


@with_keywords(BenchKeywords)
def bench(
    *,
    progress: Callable[[Mapping[str, Any]], None] = lambda event: None,
    **options: Unpack[BenchKeywords],
) -> BenchReport | None:
    """Measure ways to save on this machine: how long each blocks training, until it is durable.

    ``progress`` is called with what happens, each a mapping with an ``event``. None on all torchrun
    ranks but the first. Raises UsageError, Unsupported without torch or room, TransferError where
    nothing could be measured.
    """
    from ckptool.commands.bench.run import prepare_bench

    parsed = Keywords("bench", options, BenchKeywords).options(BenchOptions)
    if parsed.like is not None and parsed.size is not None:
        raise UsageError("like and size cannot be combined")
    return prepare_bench(parsed).run(progress)


def bench_changes(
    report: BenchReport, compare: AnyPath, tolerance: float | str = "10%"
) -> list[Change]:
    """Compare a report with the earlier run that ``compare`` keeps, of ``ckptool bench --json``.

    ``regressed`` of each says whether it is slower by more than ``tolerance``, or worse. Raises
    NotFound or UsageError where there is no such file, Unsupported where it measured something
    else.
    """
    from ckptool.commands.bench.report import Baseline, parse_tolerance

    baseline, allowed = Baseline.read(Path(compare)), parse_tolerance(str(tolerance))
    baseline.require_comparable(report.settings)
    measured = [result.name for result in report.results]
    return baseline.changes(report, allowed, [*measured, *report.skipped, *report.failed])


def bench_transfer(
    source: AnyPath | None = None,
    *,
    size: Size = "2GB",
    out: AnyPath = ".",
    repeat: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> TransferBenchReport:
    """Measure ckptool's own commands against cp and torch's, on ``source`` or one of ``size``.

    As ``ckptool bench --transfer``. Raises Unsupported where the disk is too small for it.
    """
    from ckptool.commands.bench.transfer.run import transfer_bench

    place = None if source is None else Path(source)
    return transfer_bench(
        place, parse_size(str(size), "size"), Path(out), repeat, progress=progress
    )


def bench_stores(
    *,
    size: Size = "256MB",
    out: AnyPath = ".",
    repeat: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> TransferBenchReport:
    """Measure ckptool's own commands on a store against plain downloads, on one of ``size``.

    As ``ckptool bench --stores``. Raises Unsupported where the disk is too small for it, or s3fs or
    torch is missing.
    """
    from ckptool.commands.bench.transfer.stores import store_bench

    return store_bench(parse_size(str(size), "size"), Path(out), repeat, progress=progress)
