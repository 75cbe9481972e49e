"""The commands as functions: the same options as keywords, the same reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ckptool.api.arguments import AnyPath, Keywords, Strings, location, with_keywords
from ckptool.api.checkpoint import Checkpoint, checkpoint_at
from ckptool.api.keywords import (
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
from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.inspect import report as _inspect
from ckptool.commands.inspect.report import InspectReport
from ckptool.commands.options.declaration import TEXTS
from ckptool.commands.options.diff import DiffOptions
from ckptool.commands.options.extract import ExtractOptions
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.question import Question
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.steps import StepChoice
from ckptool.commands.options.target import ConvertOptions, ReshardOptions
from ckptool.commands.options.verify import SalvageOptions, VerifyOptions
from ckptool.commands.reshard.reshard import ReshardReport, prepare_reshard
from ckptool.engine.progress import Progress
from ckptool.engine.ranks import join_ranks
from ckptool.errors import Several
from ckptool.formats import list_formats as list_formats
from ckptool.storage.place import full_name, on_disk
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.extract import ExtractReport
    from ckptool.commands.inspect.stats import StatsReport
    from ckptool.commands.inspect.steps import RunSummary
    from ckptool.commands.runs.convert import ConvertRunReport
    from ckptool.commands.runs.prune.prune import PruneReport
    from ckptool.commands.runs.verify import RunReport
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.commands.verify.compare.diff import DiffReport
    from ckptool.commands.verify.findings import VerifyReport
    from ckptool.commands.verify.salvage.salvage import SalvageReport
    from ckptool.core.keymap.model import KeyMap


OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done so far and the bytes in all, by any thread."""


def _place(path: AnyPath | Checkpoint, options: Mapping[str, Any]) -> tuple[Location, Any]:
    """Return a place and the options to read it with, including those of an open checkpoint.

    Raises Changed if its files changed since it was opened.
    """
    if not isinstance(path, Checkpoint):
        return location(path), options
    path.require_unchanged()
    return path.named, {**path.options, **options}


@with_keywords(ReadKeywords)
def inspect(
    path: AnyPath | Checkpoint, *, values: bool | None = None, **options: Unpack[ReadKeywords]
) -> InspectReport | RunSummary:
    """Describe the checkpoint at ``path``, or the steps of a run there, from metadata alone.

    ``values`` stored among the data are read from a disk; from a URL only if True. Raises NotFound,
    Unrecognized, Damaged or Hostile, as every function here does. ``open`` is for one checkpoint.
    """
    if isinstance(path, Checkpoint):
        return _inspect.report(checkpoint_at(path, **options).opened)
    place = location(path)
    values = on_disk(place) is not None if values is None else values
    read = Keywords("inspect", options, ReadKeywords).options(ReadOptions, values=values)
    try:
        return _inspect.inspect(place, read)
    except Several:
        if not place.is_dir():
            raise
        return list_steps(full_name(place), **options)


@with_keywords(ReadKeywords)
def list_steps(run: AnyPath, **options: Unpack[ReadKeywords]) -> RunSummary:
    """Describe the steps of a run's folder from their metadata, oldest first.

    Same as ``ckptool inspect RUN``: when each was saved, its size, whether it is complete.
    """
    from ckptool.commands.inspect.steps import list_steps as _list_steps

    read = Keywords("list_steps", options, ReadKeywords).options(ReadOptions)
    return _list_steps(location(run), read)


@with_keywords(ReadKeywords)
def stats(
    path: AnyPath | Checkpoint,
    tensors: str | Sequence[str] = "*",
    *,
    progress: OnProgress | None = None,
    **options: Unpack[ReadKeywords],
) -> StatsReport:
    """Read the tensors that match a glob: min, max, mean, std, zeros, NaN and Inf of each.

    Same as ``ckptool inspect PATH --stats NAME``; memory is bounded whatever their size.
    """
    from ckptool.commands.inspect.stats import stats as _stats
    from ckptool.commands.open import open_checkpoint

    read = Keywords("stats", options, ReadKeywords).options(ReadOptions)
    if isinstance(path, Checkpoint):
        opened = checkpoint_at(path, **options).opened
        path.require_unchanged()
    else:
        opened = open_checkpoint(location(path), read)
    globs = [tensors] if isinstance(tensors, str) else tensors
    return _stats(opened, globs, Progress(progress))


@with_keywords(DiffKeywords)
def diff(
    path: AnyPath | Checkpoint,
    other: AnyPath,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[DiffKeywords],
) -> DiffReport:
    """Compare names, shapes and types of two checkpoints' tensors; with ``values`` their content.

    ``other`` may be a model's config.json. The report is true if nothing differs; its ``fit`` is
    the option that would give ``path`` more of the other's names.
    """
    from ckptool.commands.verify.compare.diff import diff as _diff

    place, keywords = _place(path, options)
    parsed = Keywords("diff", keywords, DiffKeywords).options(DiffOptions)
    return _diff(place, location(other), parsed, Progress(progress))


@with_keywords(ExtractKeywords)
def extract(
    path: AnyPath | Checkpoint,
    names: Strings,
    out: AnyPath,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[ExtractKeywords],
) -> ExtractReport:
    """Write tensors, or slices such as ``w[0:4, :8]``, to the .npy or .safetensors file ``out``.

    ``open(path).read`` reads them into memory. Raises as ``convert`` does, and Unsupported if
    ``out`` exists or cannot hold an element type.
    """
    from ckptool.commands.extract import prepare_extract

    place, keywords = _place(path, options)
    parsed = Keywords("extract", keywords, ExtractKeywords).options(ExtractOptions)
    subscripts = [names] if isinstance(names, str) else names
    planned = prepare_extract(place, subscripts, location(out), parsed)
    return planned.run(Progress(progress))


@with_keywords(ConvertKeywords)
def convert(
    source: AnyPath | Checkpoint,
    target: AnyPath,
    *,
    to: str | None = None,
    progress: OnProgress | None = None,
    **options: Unpack[ConvertKeywords],
) -> ConvertReport:
    """Write ``source`` in the format ``to`` at ``target``, complete or not at all.

    Without ``to`` the target's suffix decides: ``.safetensors`` or ``.pt``. ``progress`` is called
    with the bytes written, or read from both sides to compare them, so far and in all. It works
    alone, also in a job of torchrun: one rank may call it. Raises UsageError or Unsupported if it
    cannot be done as requested, TransferError if it fails midway: ``resume=True`` then continues.
    """
    place, keywords = _place(source, options)
    parsed = Keywords("convert", keywords, ConvertKeywords).options(ConvertOptions, to=to)
    prepared = prepare(place, location(target), parsed)
    if parsed.transfer.dry_run:
        return prepared.with_costs()
    return prepared.run(Progress(progress))


@with_keywords(ConvertKeywords)
def convert_run(
    run: AnyPath,
    target: AnyPath,
    *,
    to: str | None = None,
    last: int | None = None,
    every: int | None = None,
    allow_nonfinite: bool = False,
    ignore: Strings = (),
    progress: OnProgress | None = None,
    **options: Unpack[ConvertKeywords],
) -> ConvertRunReport:
    """Convert the good steps of a run, each under its own name in ``target``.

    All of them, the ``last`` N, or those whose number is a multiple of ``every``. The report is
    true if there are any, and none failed. Same as ``ckptool convert RUN DST --all-steps``.
    """
    from ckptool.commands.runs.convert import convert_run as _convert_run

    parsed = Keywords("convert_run", options, ConvertKeywords).options(ConvertOptions, to=to)
    accepted = TEXTS.parse(ignore, "ignore")
    choice = StepChoice(last is None is every, last, every, allow_nonfinite, accepted)
    places = location(run), location(target)
    return _convert_run(*places, choice, parsed, progress=Progress(progress))


@with_keywords(ReshardKeywords)
def reshard(
    source: AnyPath | Checkpoint,
    target: AnyPath | None = None,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[ReshardKeywords],
) -> ReshardReport:
    """Write ``source`` for a new device mesh at ``target``, or beside it, named after the mesh.

    Under torchrun the ranks share the work; no process group may exist yet. Raises as ``convert``
    does, the same on every rank.
    """
    place, keywords = _place(source, options)
    parsed = Keywords("reshard", keywords, ReshardKeywords).options(ReshardOptions)
    where = None if target is None else location(target)
    with join_ranks() as group:
        with group.together():
            planned = prepare_reshard(place, where, parsed, ranks=group.size)
        planned.require_possible(group)
        if parsed.transfer.dry_run:
            return planned.with_costs()
        return planned.run(Progress(progress), group)


@with_keywords(VerifyKeywords)
def verify(
    path: AnyPath | Checkpoint,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[VerifyKeywords],
) -> VerifyReport:
    """Check that the checkpoint at ``path`` is complete, unchanged and safe: true if it is.

    ``write_manifest`` is written if no errors are found; with ``manifest`` every tensor is compared
    with what it records, whatever the format; with ``like`` the model's names and shapes with those
    of another checkpoint or a config.json. Raises NotFound or Unrecognized if there is no
    checkpoint. Damage does not raise: it is in the report.
    """
    from ckptool.commands.verify.answer import answer

    place, keywords = _place(path, options)
    question = Keywords("verify", keywords, VerifyKeywords).options(Question)
    question.require_possible()
    return answer(place, question, Progress(progress))


@with_keywords(CompareKeywords)
def compare(
    path: AnyPath | Checkpoint,
    other: AnyPath,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[CompareKeywords],
) -> AgainstReport:
    """Compare two checkpoints of any format, bit by bit, or as numbers if requested.

    Same as ``ckptool verify PATH --against OTHER``; the report is true if they are equal.
    """
    from ckptool.commands.verify.compare.against import against

    place, arguments = _place(path, options)
    question = Keywords("compare", arguments, CompareKeywords).options(Question)
    return against(place, location(other), question, Progress(progress))


@with_keywords(VerifyRunKeywords)
def verify_run(
    run: AnyPath, *, every: bool = False, **options: Unpack[VerifyRunKeywords]
) -> RunReport:
    """Verify a run's steps from newest to oldest up to the first without errors: ``latest_good``.

    Same as ``ckptool verify RUN --latest-good``; with ``every``, as ``--all``.
    """
    from ckptool.commands.runs.verify import verify_run as _verify_run

    parsed = Keywords("verify_run", options, VerifyRunKeywords).options(VerifyOptions)
    return _verify_run(location(run), parsed, every=every)


@with_keywords(PruneKeywords)
def prune(run: AnyPath, *, keep_last: int, **options: Unpack[PruneKeywords]) -> PruneReport:
    """Decide which steps of a run to keep, verify these, and with ``yes`` remove the others.

    Same as ``ckptool prune RUN --keep-last N``; ``ok`` of the report is true if all kept steps are
    good. Raises TransferError if something cannot be removed.
    """
    from ckptool.commands.runs.prune.prune import prune as _prune

    keywords = Keywords("prune", options, PruneKeywords)
    return _prune(location(run), keywords.options(PruneOptions, keep_last=keep_last))


@with_keywords(SalvageKeywords)
def salvage(
    path: AnyPath,
    target: AnyPath,
    *,
    progress: OnProgress | None = None,
    **options: Unpack[SalvageKeywords],
) -> SalvageReport:
    """Write what is intact of a damaged checkpoint to ``target``: see ``lost``.

    ``target`` is a DCP folder, or a .safetensors or .pt file; a list of what is lost is written
    beside it. Raises Unsupported if nothing is intact.
    """
    from ckptool.commands.verify.salvage.salvage import plan_salvage

    parsed = Keywords("salvage", options, SalvageKeywords).options(SalvageOptions)
    planned = plan_salvage(location(path), location(target), parsed)
    return planned.run(Progress(progress))


def list_maps() -> Mapping[str, KeyMap]:
    """Return the built-in key maps, by the name that ``map=`` takes."""
    from ckptool.commands.keymap.library import builtin_maps

    return dict(builtin_maps())


def map_text(name: str) -> str:
    """Return the TOML text of a built-in key map, as a start for one's own."""
    from ckptool.commands.keymap import library

    return library.map_text(name)
