"""The commands as functions: the same options as keywords, the commands' own reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, Size, Strings, location, with_keywords
from ckptool.api.keywords import (
    BenchKeywords,
    CompareKeywords,
    ConvertKeywords,
    DiffKeywords,
    ExtractKeywords,
    PruneKeywords,
    ReadKeywords,
    ReshardKeywords,
    SalvageKeywords,
    VerifyKeywords,
    VerifyRunKeywords,
)
from ckptool.commands import inspect as _inspect
from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.detect import list_formats as list_formats
from ckptool.commands.inspect import InspectReport
from ckptool.commands.options.bench import BenchOptions
from ckptool.commands.options.diff import DiffOptions
from ckptool.commands.options.extract import ExtractOptions
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions
from ckptool.commands.options.verify import (
    CompareOptions,
    ManifestOptions,
    SalvageOptions,
    VerifyOptions,
)
from ckptool.commands.reshard.reshard import ReshardReport, prepare_reshard
from ckptool.commands.transfer import Progress, no_progress
from ckptool.core.options import parse_size
from ckptool.engine.ranks import join_ranks
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.bench.report import BenchReport, Change
    from ckptool.commands.bench.transfer.report import TransferBenchReport
    from ckptool.commands.extract import ExtractReport
    from ckptool.commands.stats import TensorStats
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.commands.verify.compare.diff import DiffReport
    from ckptool.commands.verify.findings import VerifyReport
    from ckptool.commands.verify.prune import PruneReport
    from ckptool.commands.verify.run_folder import RunReport
    from ckptool.commands.verify.salvage.salvage import SalvageReport
    from ckptool.core.keymap.model import KeyMap


@with_keywords(ReadKeywords)
def inspect(
    path: AnyPath, *, values: bool | None = None, **options: Unpack[ReadKeywords]
) -> InspectReport:
    """Describe the checkpoint at ``path`` from its metadata alone.

    ``values`` stored among the data are read from a disk; from a URL only if it is True. Raises
    NotFound, Unrecognised, Damaged or Hostile, as every function here does.
    """
    place = location(path)
    values = isinstance(place, Path) if values is None else values
    read = Keywords("inspect", options, ReadKeywords).options(ReadOptions, values=values)
    return _inspect.inspect(place, read)


@with_keywords(ReadKeywords)
def stats(
    path: AnyPath, tensors: str | Sequence[str] = "*", **options: Unpack[ReadKeywords]
) -> list[TensorStats]:
    """Read the tensors that match a glob: min, max, mean, std, zeros, NaN and Inf of each.

    As ``ckptool inspect PATH --stats GLOB``; memory is bounded whatever their size.
    """
    from ckptool.commands.open import open_checkpoint
    from ckptool.commands.stats import stats as _stats

    read = Keywords("stats", options, ReadKeywords).options(ReadOptions)
    opened = open_checkpoint(location(path), read)
    return _stats(opened, [tensors] if isinstance(tensors, str) else tensors)


@with_keywords(DiffKeywords)
def diff(
    path: AnyPath,
    other: AnyPath,
    *,
    progress: Progress = no_progress,
    **options: Unpack[DiffKeywords],
) -> DiffReport:
    """Compare names, shapes and types of two checkpoints' tensors; with ``values`` their content.

    ``other`` may be a model's config.json. ``ok`` of the report says whether nothing differs,
    ``fit`` what would give ``path`` more of the other's names.
    """
    from ckptool.commands.verify.compare.diff import diff as _diff

    parsed = Keywords("diff", options, DiffKeywords).options(DiffOptions)
    return _diff(location(path), location(other), parsed, lambda total: progress)


@with_keywords(ExtractKeywords)
def extract(
    path: AnyPath,
    names: Strings,
    out: AnyPath,
    *,
    progress: Progress = no_progress,
    **options: Unpack[ExtractKeywords],
) -> ExtractReport:
    """Write tensors, or slices such as ``w[0:4, :8]``, to the .npy or .safetensors file ``out``.

    ``open(path).read`` has them in memory. Raises as ``convert`` does, Unsupported where ``out``
    exists or cannot hold an element type.
    """
    from ckptool.commands.extract import prepare_extract

    parsed = Keywords("extract", options, ExtractKeywords).options(ExtractOptions)
    asked = [names] if isinstance(names, str) else names
    return prepare_extract(location(path), asked, location(out), parsed).run(progress)


@with_keywords(ConvertKeywords)
def convert(
    source: AnyPath,
    target: AnyPath,
    *,
    to: str,
    progress: Progress = no_progress,
    **options: Unpack[ConvertKeywords],
) -> ConvertReport:
    """Write ``source`` in the format ``to`` at ``target``, complete or not at all.

    ``progress`` is called with the bytes that were written, or read of both sides to compare them,
    since the last call. Raises UsageError or Unsupported where it cannot be done as asked,
    TransferError where it fails midway: ``resume=True`` then continues.
    """
    parsed = Keywords("convert", options, ConvertKeywords).options(ConvertOptions, to=to)
    prepared = prepare(location(source), location(target), parsed)
    return prepared.report if parsed.transfer.dry_run else prepared.run(progress)


@with_keywords(ReshardKeywords)
def reshard(
    source: AnyPath,
    target: AnyPath | None = None,
    *,
    progress: Progress = no_progress,
    **options: Unpack[ReshardKeywords],
) -> ReshardReport:
    """Write ``source`` for a new device mesh at ``target``, or beside it, named after the mesh.

    Under torchrun the ranks share the work; there must be no process group yet. Raises as
    ``convert`` does, on every rank the same.
    """
    parsed = Keywords("reshard", options, ReshardKeywords).options(ReshardOptions)
    where = None if target is None else location(target)
    with join_ranks() as group:
        planned = group.together(lambda: prepare_reshard(location(source), where, parsed))
        planned.require_possible(group)
        return planned.report if parsed.transfer.dry_run else planned.run(progress, group)


@with_keywords(VerifyKeywords)
def verify(
    path: AnyPath, *, progress: Progress = no_progress, **options: Unpack[VerifyKeywords]
) -> VerifyReport:
    """Check that the checkpoint at ``path`` is complete, unchanged and safe: see ``ok``.

    ``write_manifest`` is written if no errors are found; with ``manifest`` every tensor is compared
    with what was recorded, whatever the format. Raises NotFound and Unrecognised where there is no
    checkpoint, and nothing for damage: that is in the report.
    """
    keywords = Keywords("verify", options, VerifyKeywords)
    parsed, rewrite = keywords.options(VerifyOptions), keywords.options(RewriteOptions)
    manifest = keywords.options(ManifestOptions)
    target, recorded = manifest.write_manifest, manifest.manifest
    if target is not None and recorded is not None:
        raise UsageError("manifest and write_manifest cannot be combined")
    from ckptool.commands.verify import verify as _verify
    from ckptool.commands.verify.manifest.build import build_manifest
    from ckptool.commands.verify.manifest.check import check_manifest

    def started(total: int) -> Progress:
        return progress

    place, overwrite = location(path), manifest.overwrite
    if target is not None:
        return build_manifest(place, target, parsed, rewrite, started, overwrite=overwrite)
    if recorded is not None:
        return check_manifest(place, recorded, parsed, rewrite, started)
    if rewrite != RewriteOptions():
        raise UsageError("selecting, renaming, mapping or casting needs a manifest, or compare()")
    return _verify.verify(place, parsed, started)


@with_keywords(CompareKeywords)
def compare(
    path: AnyPath,
    other: AnyPath,
    *,
    progress: Progress = no_progress,
    **options: Unpack[CompareKeywords],
) -> AgainstReport:
    """Compare two checkpoints of any formats, bit by bit, or as numbers where asked.

    As ``ckptool verify PATH --against OTHER``; ``verify.ok`` of the report says whether they
    are the same.
    """
    from ckptool.commands.verify.compare.against import against

    keywords = Keywords("compare", options, CompareKeywords)
    parsed, rewrite = keywords.options(VerifyOptions), keywords.options(RewriteOptions)
    comparing, places = keywords.options(CompareOptions), (location(path), location(other))
    return against(*places, parsed, rewrite, comparing, lambda total: progress)


@with_keywords(VerifyRunKeywords)
def verify_run(
    run: AnyPath, *, every: bool = False, **options: Unpack[VerifyRunKeywords]
) -> RunReport:
    """Verify a run's steps from the newest to the first one without errors: see ``latest_good``.

    As ``ckptool verify RUN --latest-good``, or with ``every`` step as ``--all``.
    """
    from ckptool.commands.verify.run_folder import verify_run as _verify_run

    parsed = Keywords("verify_run", options, VerifyRunKeywords).options(VerifyOptions)
    return _verify_run(location(run), parsed, every=every)


@with_keywords(PruneKeywords)
def prune(run: AnyPath, *, keep_last: int, **options: Unpack[PruneKeywords]) -> PruneReport:
    """Decide which steps of a run to keep, verify these, and with ``yes`` remove the others.

    As ``ckptool prune RUN --keep-last N``; ``ok`` of the report says whether all that is kept is
    good. Raises TransferError where something cannot be removed.
    """
    from ckptool.commands.verify.prune import prune as _prune

    keywords = Keywords("prune", options, PruneKeywords)
    return _prune(location(run), keywords.options(PruneOptions, keep_last=keep_last))


@with_keywords(SalvageKeywords)
def salvage(
    path: AnyPath,
    target: AnyPath,
    *,
    progress: Progress = no_progress,
    **options: Unpack[SalvageKeywords],
) -> SalvageReport:
    """Write what is intact of a damaged checkpoint to ``target``: see ``lost``.

    ``target`` is a DCP folder, or a .safetensors or .pt file; a list of what is lost comes beside
    it. Raises Unsupported where nothing is intact.
    """
    from ckptool.commands.verify.salvage.salvage import plan_salvage

    parsed = Keywords("salvage", options, SalvageKeywords).options(SalvageOptions)
    return plan_salvage(location(path), location(target), parsed).run(progress)


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


def list_maps() -> Mapping[str, KeyMap]:
    """Return the key maps that come with ckptool, by the name that ``map=`` takes."""
    from ckptool.commands.keymap.maps import builtin_maps

    return dict(builtin_maps())


def map_text(name: str) -> str:
    """Return a built-in key map as the TOML file that it is, to begin one's own with."""
    from ckptool.commands.keymap import maps

    return maps.map_text(name)
