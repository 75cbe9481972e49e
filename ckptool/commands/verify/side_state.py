"""The optimizer's state that a trainer keeps in a file beside the model: a resume needs both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from ckptool.commands.open import Survey
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks.meaning.counts import optimizer_step_problems
from ckptool.commands.verify.checks.training import has_experts
from ckptool.commands.verify.codes import Severity
from ckptool.commands.verify.findings import Finding, VerifyReport, summarize
from ckptool.errors import Unrecognized
from ckptool.formats.companions import trainer_optimizer
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.verify.verify import Verification

_OF_A_FILE = ("note", "no-checksum", "value-not-written")
"""Remarks on what can be done with the file by itself."""
_OF_STEPS = ("steps-differ", "steps-apart")


def with_side_state(
    report: VerifyReport,
    surveyed: Survey,
    options: VerifyOptions,
    check: Callable[[Location, VerifyOptions], Verification],
) -> VerifyReport:
    """Return a report with what is found of the Trainer's ``optimizer.pt`` beside the model.

    ``check`` examines it as a checkpoint; an optimizer may have nothing to save. It numbers
    parameters, of which those of experts may have had fewer steps.
    """
    catalog = surveyed.catalog
    name = trainer_optimizer(surveyed.source.files, catalog.files) if catalog else None
    if name is None:
        return report
    read = ReadOptions("torch-save", storage_option=options.read.storage_option)
    try:
        checked = check(surveyed.path / name, replace(options, read=read, part=None))
    except Unrecognized:
        return report
    beside = checked.report(
        optimizer_step_problems(surveyed, checked.surveyed.catalog, checked.content.counters.taken)
    )
    left_out = {*_OF_A_FILE, *(_OF_STEPS if has_experts(catalog) else ())}
    found = [_of(name, each) for each in beside.findings if each.code not in left_out]
    whole = structs.replace(
        report,
        findings=tuple(sorted([*report.findings, *found], key=_rank)),
        nbytes=report.nbytes + beside.nbytes,
        files=report.files + beside.files,
        tensors=report.tensors + beside.tensors,
        ignored=(*report.ignored, *beside.ignored),
    )
    whole = structs.replace(whole, ok=not whole.fails(options.strict))
    return structs.replace(whole, summary=summarize(whole, options))


def _rank(finding: Finding) -> int:
    return list(Severity).index(finding.severity)


def _of(name: str, finding: Finding) -> Finding:
    """Return a finding of a file, said of the file unless its message begins with it."""
    return finding if finding.message.startswith(name) else finding.within(name)
