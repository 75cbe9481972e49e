"""Whether a checkpoint is sound, and the optimizer's file beside it, which a resume needs, too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace

from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks.meaning.counts import optimizer_step_problems
from ckptool.commands.verify.checks.training import has_experts
from ckptool.commands.verify.findings import Finding, VerifyReport, summarize
from ckptool.commands.verify.verification import Verification, examine
from ckptool.core.catalog import Catalog
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.ranks import Ranks
from ckptool.engine.share import Share
from ckptool.errors import Unrecognized, UsageError
from ckptool.formats.companions import trainer_optimizer
from ckptool.storage.url import Location

_OF_A_FILE = ("note", "no-checksum", "value-not-written")
"""Remarks on what can be done with the file by itself."""
_OF_STEPS = ("steps-differ", "steps-apart")


def verify(
    path: Location,
    options: VerifyOptions,
    progress: Progress = UNWATCHED,
    ranks: Ranks | None = None,
) -> VerifyReport:
    """Check the checkpoint at ``path``, all of it or a part, sharing the work with ``ranks``.

    Raises as ``examine`` does, UsageError for options that are at odds.
    """
    ranks = ranks or Ranks()
    if options.part is not None and (ranks.size > 1 or options.quick or options.sample < 1):
        raise UsageError("--part shares all of the data: not with --quick, --sample or torchrun")
    share = options.part or Share(ranks.rank, ranks.size)
    with ranks.together():
        verification = examine(path, options, progress, share=share)
    if ranks.size > 1:
        verification.join(ranks)
    report = verification.report()
    if share.position:
        return report  # the first of the parts, or ranks, reads all of what is beside
    return _with_side_state(report, verification, options)


def _with_side_state(
    report: VerifyReport, model: Verification, options: VerifyOptions
) -> VerifyReport:
    """Return a report with the findings on the Trainer's ``optimizer.pt`` beside the model.

    An optimizer may have nothing to save. It knows parameters by number, so it does not tell which
    are of experts, which may have had fewer steps.
    """
    source, catalog = model.surveyed.source, model.surveyed.catalog
    name = trainer_optimizer(source.files, catalog.files) if catalog else None
    if name is None:
        return report
    try:
        side, _ = examine_side_file(model.surveyed.path / name, options, [model])
    except Unrecognized:
        return report
    left_out = {*_OF_A_FILE, *(_OF_STEPS if has_experts(catalog) else ())}
    findings = [_within(name, finding) for finding in side.findings if finding.code not in left_out]
    whole = replace(
        report,
        findings=tuple(sorted([*report.findings, *findings], key=lambda f: f.severity.place)),
        nbytes=report.nbytes + side.nbytes,
        files=report.files + side.files,
        tensors=report.tensors + side.tensors,
        ignored=(*report.ignored, *side.ignored),
    )
    whole = replace(whole, ok=not whole.fails(options.strict))
    return replace(whole, summary=summarize(whole, options))


def examine_side_file(
    file: Location, options: VerifyOptions, checkpoints: Sequence[Verification]
) -> tuple[VerifyReport, Catalog | None]:
    """Return the report and the catalog of a file, verified as a checkpoint, that a resume needs.

    Its optimizer must have taken the steps that the ``checkpoints`` beside it count, of which the
    first has its model.
    """
    read = ReadOptions("torch-save", storage_option=options.read.storage_option)
    model = next((checkpoint.elements for checkpoint in checkpoints), None)
    examined = examine(file, replace(options, read=read, part=None), model=model)
    catalog, counts = examined.surveyed.catalog, examined.content.counters.taken
    steps = (optimizer_step_problems(c.surveyed, catalog, counts) for c in checkpoints)
    return examined.report(chain.from_iterable(steps)), catalog


def _within(name: str, finding: Finding) -> Finding:
    """Return a finding of a file, said of the file unless its message begins with it."""
    return finding if finding.message.startswith(name) else finding.within(name)
