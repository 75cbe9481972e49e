"""The newest good step of a run, or all its steps, and how the newest is known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from msgspec import field

from ckptool.commands.document import Report
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.assessment import Assessor, StepReport
from ckptool.commands.runs.exports import is_export
from ckptool.commands.runs.order import open_run, written_after
from ckptool.commands.runs.pointers.pointers import (
    dangling_pointers,
    find_pointers,
    is_pointer,
    latest_source,
)
from ckptool.commands.runs.search import as_one_step
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.verify.codes import require_codes
from ckptool.errors import TransferError
from ckptool.storage.place import is_gone
from ckptool.storage.url import Location, within

_ALONE = "a model alone: nothing that training goes on from is good"


class RunReport(Report, frozen=True):
    """The verified steps, newest first; ``total`` is how many the run has.

    True if one is good; if ``every`` step was verified, true if there are any and all are.
    ``chosen`` says how the newest good step was found to be the newest. If training can go on from
    none, it is a model ``alone``.
    """

    computed: ClassVar = ("ok",)

    path: Location
    steps: tuple[StepReport, ...]
    total: int
    every: bool = field(default=False, name="_every")
    chosen: str = ""
    alone: Location | None = field(default=None, name="_alone")

    schema: ClassVar = "verify-run"

    @property
    def ok(self) -> bool:
        if self.every:
            return bool(self.steps) and all(step.ok for step in self.steps)
        return self.latest_good is not None

    def more(self) -> Mapping[str, object]:
        """Return the path of the newest good step."""
        return {"latest_good": None if self.latest_good is None else self.latest_good.path}

    def _short(self) -> dict[str, Any]:
        newest = {name: str(path) for name, path in self.more().items() if path is not None}
        return Report._short(self) | newest

    @property
    def latest_good(self) -> StepReport | None:
        """Return the newest step without errors."""
        newest = next((step for step in self.steps if step.goes_on), None)
        return newest or next((step for step in self.steps if step.path == self.alone), None)


def verify_run(run: Location, options: VerifyOptions, *, every: bool) -> RunReport:
    """Assess the steps of a run from the newest to the first good one, or every one.

    An unreadable step fails; one that is removed meanwhile is skipped. Raises NotFound or
    Unrecognized if the folder has no checkpoint, UsageError for options that suit no step, NoAnswer
    if a store does not answer.
    """
    require_codes(options.ignore)
    opened = as_one_step(open_run(run, options.read))
    assessor = Assessor(opened, options, thorough=every, skims=not every)
    reports: dict[Location, StepReport] = {}
    newest: Step | None = None
    models: list[Step] = []
    for step in reversed(opened.steps):
        report = assessor.assess(step).report
        if not report.ok and is_gone(report.path):
            continue
        reports[step.path] = report
        if report.goes_on:
            newest = newest or step
            if not every:
                break
        elif report.ok and not is_export(step, opened.path) and assessor.contents_of(step).model:
            models.append(step)
    if newest is not None and (damaged := assessor.damaged_beside(newest)):
        reports |= {report.path: report for report in damaged}
        models, newest = [newest], None
    chosen, model = "", None
    if newest is not None:
        series = opened.by_series[newest.series]
        after = (reports.get(step.path) for step in series[series.index(newest) + 1 :])
        passed = [report.path for report in after if report is not None and report.ok]
        chosen = _describe_choice(opened, newest, passed)
    for step in () if newest is not None else models:
        # it was passed over by its metadata alone
        reports[step.path] = assessor.assess(step, reads=not options.quick).report
        if reports[step.path].ok:
            model, chosen = step.path, f"{_describe_choice(opened, step)}; {_ALONE}"
            break
    return RunReport(run, (*reports.values(),), len(opened.steps), every, chosen, model)


def _describe_choice(run: Run, step: Step, passed: Collection[Location] = ()) -> str:
    """Return how a step was found to be the newest, with what speaks against it.

    Newer ones of its series that are models alone were ``passed`` over, as torchtitan's last.
    """
    later_step = written_after(run, step)
    doubt = "".join(f"; {path.name}, which is newer, is a model alone" for path in passed)
    if later_step is not None and later_step.path not in passed:
        doubt += f"; {later_step.path.name} was written later"
    doubt += "".join(f"; {source} names {other}" for source, other in _other_latest(run, step))
    with suppress(TransferError):
        lost = dangling_pointers(run)
        doubt += "".join(f"; {source} names {other}, which is not there" for source, other in lost)
    return f"{step.placed or 'as the only step'}{doubt}"


def _other_latest(run: Run, step: Step) -> Iterator[tuple[str, str]]:
    """Yield what a trainer would resume by, and the other step that it names.

    A pointer that cannot be read names none.
    """
    with suppress(TransferError):
        pointers = find_pointers(run)
        sources = {path: latest_source(sources) for path, sources in pointers.items()}
        for path, source in sources.items():
            if source is not None and not sources.get(step.path) and is_pointer(run, source):
                yield source, str(within(path, run.path))
