"""Whether a checkpoint is whole, unchanged and safe, from its own files alone.

Nothing stops the rest: what a scan steps over becomes a finding, every file is looked at by itself,
and then the content is read once.

Which share of the data a verification reads.

Whether files stayed as they were while they were read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ckptool.commands.inspect.stats import not_finite_count
from ckptool.commands.open import Survey, survey
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks.consistency import (
    catalog_problems,
    integrity_problems,
    replica_problems,
    unnamed_latest,
    unwritten_ends,
)
from ckptool.commands.verify.checks.content import Views, attach, located, scattered_not_finite
from ckptool.commands.verify.checks.files import FileCheck, name_problems, newer_than_metadata
from ckptool.commands.verify.checks.model_folder import folder_problems
from ckptool.commands.verify.checks.pickles import odd_values
from ckptool.commands.verify.checks.training import optimizer_problems, step_problems
from ckptool.commands.verify.codes import CODES, Severity, failing, require_codes
from ckptool.commands.verify.findings import Finding, Findings
from ckptool.commands.verify.report import VerifyReport, summarize
from ckptool.core.catalog import Catalog, Container, TensorEntry
from ckptool.core.state_category import state_category
from ckptool.engine.check.content import Found, check_spans
from ckptool.engine.check.spans import Span
from ckptool.errors import Problem
from ckptool.formats.companions import lost_random_states
from ckptool.storage.file_status import changed
from ckptool.storage.local import Files
from ckptool.storage.url import Location

Progress = Callable[[int], None]
Started = Callable[[int], Progress]


@dataclass(frozen=True, slots=True)
class Examined:
    """A report, the SHA-256 (hex) of files that were read whole, and whether those stay as then."""

    report: VerifyReport
    digests: Mapping[str, str]
    watched: Watched


def verify(path: Location, options: VerifyOptions, started: Started | None = None) -> VerifyReport:
    """Check the checkpoint at ``path``; all findings are collected.

    ``started`` is told how many bytes will be read, and returns what is told of them as they are.
    Raises NotFound and Unrecognised where there is no checkpoint, UsageError for an unknown code.
    """
    return examine(path, options, started).report


def examine(
    path: Location, options: VerifyOptions, started: Started | None = None, *, digest: bool = False
) -> Examined:
    """As ``verify``; where all content is read, its files are digested too if that is asked."""
    require_codes(options.ignore)
    check = _Check(survey(path, options.read), options)
    check.structure(path)
    if not options.quick:
        check.content(started or (lambda total: lambda nbytes: None), digest=digest)
    return Examined(check.report(), check.digests, check.watched)


class _Check:
    """One verification: what was surveyed, and what was found so far."""

    def __init__(self, surveyed: Survey, options: VerifyOptions) -> None:
        self._survey = surveyed
        self._options = options
        self._found: list[Problem] = []
        self._sample = Sample(options.sample, options.seed)
        self._files = FileCheck(surveyed.source, surveyed.format, self._sample.takes)
        self._nbytes = 0
        catalog = surveyed.catalog
        files = catalog.files | catalog.companions if catalog else surveyed.source.files
        self.watched = Watched(surveyed.source, files)
        self.digests: Mapping[str, str] = {}
        self._spare = catalog.copies if catalog else frozenset()

    @property
    def _catalog(self) -> Catalog | None:
        return self._survey.catalog

    def structure(self, asked: Location) -> None:
        """What metadata, names and sizes show; ``asked`` is the path that the user gave."""
        self._found += unnamed_latest(asked, self._survey)
        self._found += name_problems(self._survey.source, self._survey.format, self._catalog)
        self._found += newer_than_metadata(self._survey.source, self._survey.format)
        self._files.look_at_metadata(self._catalog)
        if self._catalog is not None:
            self._found += catalog_problems(self._catalog)
            self._found += lost_random_states(self._survey.source, self._catalog)
            if self._survey.format.checks is not None:
                self._found += self._survey.format.checks(self._survey.source, self._catalog)
            self._found += optimizer_problems(self._catalog)
            self._found += folder_problems(self._survey.source, self._survey.format, self._catalog)
            self._found += odd_values(self._catalog.objects.values())

    def content(self, started: Started, *, digest: bool) -> None:
        """Open every archive, then read every record and tensor once, or every file."""
        tensors = self._located()
        self._files.look_at_items(self._catalog)
        trim = self._survey.format.trim
        meant = {name: trim(entry) for name, entry in tensors.items()} if trim else tensors
        views = Views.of(meant.values())
        inner = {item.file for item in self._catalog.archives} if self._catalog else set()
        spans = [*self._files.spans, *attach(views, self._files.spans)]
        spans = self._sample.of(spans, inner)
        found = self._read(spans, started, self._whole() if digest else {})
        names = found.not_finite
        if self._sample.is_all:
            self._found += unwritten_ends(spans, found.written, self._survey.source.files)
            names |= self._read_again(views, tensors)
        shown = [meant[name] for name in sorted(names)]
        self._found += [
            not_finite_count(entry, self._survey.source)
            for entry in shown
            if state_category(entry) != "other"
        ]
        self._found += self._without_checksum(spans)

    def _whole(self) -> dict[str, int]:
        """The files of the checkpoint with their sizes, unless only a sample is read."""
        catalog = self._catalog if self._sample.is_all else None
        return catalog.files | catalog.companions if catalog else {}

    def _located(self) -> dict[str, TensorEntry]:
        if self._catalog is None:
            return {}
        surveyed = self._survey
        tensors, problems = located(
            surveyed.format, surveyed.source, self._catalog, self._sample.takes
        )
        self._found += problems
        return tensors

    def _read(self, spans: list[Span], started: Started, whole: Mapping[str, int]) -> Found:
        """Read spans once, or files where they are to be digested."""
        source = self._survey.source
        apart = (span.nbytes for span in spans if span.packing or span.file not in whole)
        self._nbytes = sum(apart) + sum(whole.values())
        if self._sample.is_all:
            self._found += integrity_problems(source)
        progress = started(self._nbytes)
        workers = self._options.workers or source.workers
        found = check_spans(spans, source, workers, progress, whole)
        self.digests = found.digests
        self._found += found.problems
        return found

    def _read_again(self, views: Views, tensors: Mapping[str, TensorEntry]) -> set[str]:
        """What needs elements and not bytes; the tensors with NaN or infinity among them."""
        source = self._survey.source
        names, problems = scattered_not_finite(views, source)
        self._found += problems
        self._found += replica_problems(tensors.values(), source)
        if self._catalog is not None:
            self._found += step_problems(self._catalog, tensors.values(), source)
        return names

    def _without_checksum(self, spans: Iterable[Span]) -> list[Problem]:
        files = sorted({span.file for span in spans if span.crc32 is None and span.nbytes})
        if not files:
            return []
        more = f" and {len(files) - 1:,} more files" if len(files) > 1 else ""
        message = f"{files[0]}{more}: no checksum stored; changed values cannot be detected"
        return [Problem(message, "no-checksum", file=files[0])]

    def report(self) -> VerifyReport:
        """All findings, and what they come to."""
        findings = self._findings()
        severities = failing(self._options.strict)
        ok = not any(finding.severity in severities for finding in findings)
        catalog = self._catalog
        report = VerifyReport(
            self._survey.path,
            self._survey.format.name,
            findings,
            ok,
            "",
            self._options.depth,
            self._nbytes,
            len(catalog.files) if catalog else len(self._survey.source.files),
            len(catalog.tensors) if catalog else 0,
        )
        return replace(report, summary=summarize(report, self._options.sample, self._options.seed))

    def _findings(self) -> tuple[Finding, ...]:
        looked_at = map(self._of_a_copy, [*self._found, *self._files.problems])
        options, files = self._options, self._survey.source.files
        return Findings(self._catalog, files, options.ignore, options.fail_nonfinite).of(
            [*self.watched.problems(), *self._survey.problems, *looked_at],
            self._files.pickle_problems,
        )

    def _of_a_copy(self, problem: Problem) -> Problem:
        """Damage of a copy that is not read is no damage of the checkpoint."""
        is_error = CODES[problem.code].severity is Severity.ERROR
        of_a_copy = is_error and problem.file in self._spare
        return problem.recoded("copy-damaged") if of_a_copy else problem


class Sample:
    """A ``share`` of the items and of the spans outside them, chosen by ``seed``; or all."""

    def __init__(self, share: float, seed: int) -> None:
        self.is_all = share >= 1
        self._share = share
        self._chance = random.Random(seed)
        self._choices: dict[Container, bool] = {}

    def takes(self, item: Container) -> bool:
        """Whether an item is in the sample, however often that is asked."""
        if self.is_all:
            return True
        if item not in self._choices:
            self._choices[item] = self._chance.random() < self._share
        return self._choices[item]

    def of(self, spans: list[Span], chosen: Collection[str]) -> list[Span]:
        """The spans to be read: all in files of which items were ``chosen``, some of the others."""
        if self.is_all:
            return spans
        return [s for s in spans if s.file in chosen or self._chance.random() < self._share]


class Watched:
    """Some files of a source, since it was listed."""

    def __init__(self, source: Files, files: Collection[str]) -> None:
        self._source = source
        self._files = [file for file in files if file in source.files]

    def problems(self) -> list[Problem]:
        """A problem where one was written or replaced since: what was read is of no one save."""
        found = self._source.changed(self._files)
        return list(changed(found).problems) if found else []
