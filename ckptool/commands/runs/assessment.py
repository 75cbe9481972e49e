"""Which steps of a run are good: whole, without errors, and what training can go on from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.document import Report
from ckptool.commands.open import Survey, survey_readable
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.contents import (
    Completeness,
    kind_of,
    lost_ranks,
    unfinished_reason,
)
from ckptool.commands.runs.exports import Exports, is_export
from ckptool.commands.runs.models import Models, StepSurvey, as_read, survey_models, walk_models
from ckptool.commands.runs.records import Contents, read_alone
from ckptool.commands.runs.side_files import damaged_side_files, faults_in
from ckptool.commands.runs.steps import Run, Step, is_unfinished_name
from ckptool.commands.runs.trainers import is_spared
from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.commands.verify.history.history import History
from ckptool.commands.verify.verification import Verification, examine
from ckptool.core.catalog import Catalog
from ckptool.core.text import list_some
from ckptool.errors import CkptoolError, Empty, NoAnswer, NotFound, Problem
from ckptool.serialization.file_roles import may_be_empty, role_of
from ckptool.storage.place import on_disk, require_there
from ckptool.storage.url import Location, within


class StepReport(Report, frozen=True):
    """The findings for each checkpoint of a step; ``reasons`` say why it is not good.

    ``beside`` are the other entries of the run that belong to the step; an ``export`` lies beside
    the steps, without all that training goes on from.
    """

    computed: ClassVar = ("ok",)

    path: Location
    number: int | None
    reports: tuple[VerifyReport, ...]
    reasons: tuple[str, ...]
    beside: tuple[Location, ...] = ()
    export: bool = False

    schema: ClassVar = "verify-step"

    @property
    def ok(self) -> bool:
        return not self.reasons

    @property
    def goes_on(self) -> bool:
        """Whether training can go on from it: it is good, and no export."""
        return self.ok and not self.export


class Assessment(Struct, frozen=True):
    """What is found of a step: its report, and what could be read of its checkpoints."""

    report: StepReport
    surveys: tuple[Survey, ...]


class _Result(Struct):
    """What the examination of a step's checkpoints finds: why it is not good, which are empty."""

    reasons: list[str]
    empty: list[str] = field(default_factory=list)
    parts: list[Verification] = field(default_factory=list)
    reports: list[VerifyReport] = field(default_factory=list)


class Assessor:
    """Assesses the steps of one run, each once, from the newest.

    If ``thorough``, it also examines the checkpoints of a step that is not good already by the
    names of its files. If it ``skims``, it reads no data of what training does not go on from.
    """

    def __init__(
        self, run: Run, options: VerifyOptions, *, thorough: bool = False, skims: bool = False
    ) -> None:
        self._run = run
        self._options = options
        self._thorough = thorough
        self._skims = skims
        self._completeness = Completeness(run)
        self._models = Models(options.read)
        self._exports = Exports(run, self.contents_of)
        self._history = History(options.read)
        self._contents: dict[Location, Contents] = {}
        self._good: set[object] = set()
        self._first_filled: dict[object, float] = {}

    def assess(self, step: Step, *, reads: bool = False) -> Assessment:
        """Return whether a step is good, and if not why. Raises NoAnswer.

        It ``reads`` the data even where the options leave it out.
        """
        quick = (self._options.quick or (self._skims and self._exports.has(step))) and not reads
        options = replace(self._options, quick=quick)
        result = _Result(reasons=[*self._by_names(step)])
        reasons, surveys = result.reasons, list[StepSurvey]()
        if not reasons or self._thorough:
            surveys += walk_models(step, partial(self._look, step, options, result))
        contents = Contents.of([survey for _, survey in surveys], unread=False)  # or a reason says
        if result.empty and not contents.model:
            reasons += result.empty
        # where all steps lie so, they lie beside none, and are judged as any
        export = is_export(step, self._run.path) and not self._exports.are_all()
        if not reasons:
            reasons += damaged_side_files(step, self._run, result.parts, options)
        if not reasons:
            self._contents[step.path] = contents
            export = export or self._exports.has(step)
            reasons += () if export else self._by_contents(step, surveys)
            export = export or self._exports.is_last(step)
        if not reasons and not export:
            self._good.add(step.series)
        reports = tuple(result.reports)
        report = StepReport(step.path, step.number, reports, tuple(reasons), step.beside, export)
        return Assessment(report, tuple(survey for inside, survey in surveys if not inside))

    def _look(
        self, step: Step, options: VerifyOptions, result: _Result, place: Location, inside: bool
    ) -> Survey | None:
        """Examine a checkpoint of a step, or a model inside one; None if it cannot be read.

        What is found is added to the ``result``. Raises NoAnswer.
        """
        options = replace(options, read=as_read(options.read, inside))
        head = "" if place == step.path else f"{within(place, self._run.path)}: "
        head = f"{within(place, step.path)}: " if place in step and head else head
        try:
            examined = examine(place, self._options_for(place, step, options))
            report = examined.report()
        except NoAnswer:
            raise
        except (CkptoolError, OSError) as error:
            is_empty = isinstance(error, Empty) and self._is_rightly_empty(place, step)
            (result.empty if is_empty else result.reasons).append(f"{head}{error}")
            return None
        result.parts.append(examined)
        result.reports.append(report)
        result.reasons += [head + why for why in self._faults(report, examined.surveyed.catalog)]
        return examined.surveyed

    @staticmethod
    def _options_for(part: Location, step: Step, options: VerifyOptions) -> VerifyOptions:
        """Return how to verify a part: of a tensor, one of several ranks' files has its shard."""
        read = read_alone(part, step, options.read)
        if read == options.read:
            return options
        return replace(options, read=read, ignore=(*options.ignore, "chunk-gap", "rank-missing"))

    def contents_of(self, step: Step) -> Contents:
        """Return what a step has, from its metadata. Raises NoAnswer."""
        if step.path not in self._contents:
            surveys = [*survey_models(step, self._options.read)]
            unread = sum(not inside for inside, _ in surveys) < len(step.parts)
            self._contents[step.path] = Contents.of([s for _, s in surveys], unread=unread)
        return self._contents[step.path]

    def damaged_beside(self, step: Step) -> list[StepReport]:
        """Return the reports on what a step without an optimizer needs to go on, if damaged.

        It lies once beside the steps, as the optimizer of the latest one.
        """
        if self.contents_of(step).may_resume:
            return []
        once = (other for other in self._run.steps if other.number is None)
        files = [
            other
            for other in once
            if is_export(other, self._run.path)
            or (role_of(other.path.name) == "optimizer" and self._exports.is_state_beside(other))
        ]
        reports = (self.assess(file, reads=not self._options.quick).report for file in files)
        return [report for report in reports if not report.ok]

    def _is_rightly_empty(self, part: Location, step: Step) -> bool:
        """Return whether a part of a step may have nothing in it, beside a model.

        As stable-baselines3's pytorch_variables.pth in each of its saves. No model's, optimizer's
        or average's may, nor what has something in it in an earlier step. Raises NoAnswer.
        """
        kind = kind_of(part, step, self._run)
        if not all(map(may_be_empty, kind)):
            return False
        if (step.home, kind) not in self._first_filled:
            indices = (
                index
                for index, other in enumerate(self._run.steps)
                for place in other.parts
                if other.home == step.home
                and kind_of(place, other, self._run) == kind
                and _has_something(place)
            )
            self._first_filled[step.home, kind] = next(indices, inf)
        return self._first_filled[step.home, kind] >= self._run.index(step)

    def _by_names(self, step: Step) -> Iterator[str]:
        """Yield why a step is not good by the names of its files alone."""
        if is_unfinished_name(step):
            yield "its name says that its save was never finished"
            return
        if not step.parts:
            yield _nothing_in(step.path)
            return
        why = unfinished_reason(step, self._run)
        if why is not None:
            yield why
        missing = self._completeness.lacking(step)
        if missing and why is None:
            yield f"{list_some(missing, 4)} is missing; every earlier whole step has it"
        elif why is None:
            yield from lost_ranks(step)

    def _faults(self, report: VerifyReport, catalog: Catalog | None) -> Iterator[str]:
        """Yield the first error of a checkpoint, else the first warning of what spoils training."""
        failures = report.fails(self._options.strict)
        if not report.ok:
            more = f" (and {len(failures) - 1:,} more)" if len(failures) > 1 else ""
            yield f"{_text_of(failures[0], report)}{more}" if failures else report.summary
        else:
            for fault, accepted in islice(faults_in(report.findings, catalog, self._options), 1):
                yield f"{_text_of(fault, report)}{accepted}"

    def _by_contents(self, step: Step, surveys: Sequence[StepSurvey]) -> Iterator[str]:
        """Yield what a whole checkpoint lacks that training needs."""
        contents = self._contents[step.path]
        if not contents.any_state:
            yield "has nothing of a model or an optimizer"
        elif not contents.model and any(self.contents_of(s).model for s in self._run.steps):
            yield "has no tensors of a model, which other steps have"
        earlier = self._earlier_steps(step)
        lost = self._models.lost(step, surveys, earlier) if contents.model else ()
        of_two = self._history.problems(step, surveys, [] if self._options.quick else earlier)
        for problems in (lost, self._lost_state(step, earlier), of_two):
            problem = next((p for p in problems if p.code not in self._options.ignore), None)
            if problem is not None:
                yield f"{problem.code}: {problem} (--ignore {problem.code} counts it as good)"

    def _lost_state(self, step: Step, earlier: Sequence[Step]) -> Iterator[Problem]:
        """Yield a problem if a step has no optimizer's state, unlike a whole step before it.

        One without any optimizer is judged only if no newer one of its series is good.
        """
        contents = self._contents[step.path]
        if contents.state or not (contents.optimizer or step.series not in self._good):
            return
        steps = (s for s in reversed(earlier) if contents.optimizer or s.series == step.series)
        steps = (s for s in steps if not [*self._by_names(s)])
        holder = next((s for s in steps if contents.has_lost_state_of(self.contents_of(s))), None)
        if holder is not None and not self._exports.is_last(step):
            message = f"no optimizer's state, which {holder.path.name} has: a resume begins the"
            yield Problem(f"{message} optimizer again", "moments-zero")

    def _earlier_steps(self, step: Step) -> list[Step]:
        """Return the earlier steps of a step's series, oldest first.

        One that is called the last or the best is compared with the numbered ones beside it, too.
        """
        series, index = self._run.by_series[step.series], self._run.index(step)
        if not is_spared(step.path.name):
            return [*series[: bisect_left(series, index, key=self._run.index)]]
        return [
            other
            for other in self._run.steps[:index]
            if other.series == step.series or (other.home == step.home and other.number is not None)
        ]


def _text_of(finding: Finding, report: VerifyReport) -> str:
    return f"{finding.code}: {finding.first_line(f'{report.path}: ')}"


def _has_something(part: Location) -> bool:
    """Return whether a checkpoint can be read, and has something in it. Raises NoAnswer."""
    survey = survey_readable(part)
    return survey is not None and not survey.problems


def _nothing_in(path: Location) -> str:
    try:
        if (disk := on_disk(path)) is not None:
            require_there(disk)
        is_empty = path.is_dir() and not any(path.iterdir())
    except NoAnswer:
        raise
    except (NotFound, OSError) as error:
        return f"cannot be listed: {error}"
    return "the folder is empty" if is_empty else "no known checkpoint in it"
