"""Whether one checkpoint holds the same as another: names, types, shapes, then every value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckptool.commands.open import OpenedCheckpoint, open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.verify import CompareOptions, VerifyOptions
from ckptool.commands.rewrite import RewriteResult, rewrite
from ckptool.commands.verify.codes import Severity, require_codes
from ckptool.commands.verify.compare.coverage import (
    Amount,
    Coverage,
    catalog_coverage,
    excluded,
    excluded_by_rewrite,
    rewritten_coverage,
)
from ckptool.commands.verify.compare.names import (
    Counterpart,
    applicable,
    common_values,
    counterpart,
    differing_companions,
    differing_names,
    differing_type,
    differing_unread,
    differing_values,
    readable,
    stored_tensors,
)
from ckptool.commands.verify.compare.tensors import (
    DifferingTensor,
    Pair,
    Tolerance,
    compare,
    differing_tensor,
)
from ckptool.commands.verify.compare.values import Unfolded, unfolded
from ckptool.commands.verify.findings import (
    SIDES,
    Finding,
    Findings,
    VerifyReport,
    finding_of,
    ignored_errors,
)
from ckptool.commands.verify.verify import Started, changes
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.text import plural
from ckptool.engine.check.replicas import differing_replicas
from ckptool.engine.read.tensors import CheckedSource
from ckptool.errors import CkptoolError, Damaged, Hostile, Problem, UsageError
from ckptool.formats.writing import NOT_CARRIED
from ckptool.storage.url import Location


@dataclass(frozen=True, slots=True)
class AgainstOptions:
    """What to compare with, of what, and how.

    The first side is rewritten as ``convert`` does before it is compared, so that with the same
    options an export is the same as what it was made of. Of ``verify.read``, only ``per_rank``
    applies to the other side too.
    """

    other: Location
    rewrite: RewriteOptions = field(default_factory=RewriteOptions)
    comparison: CompareOptions = field(default_factory=CompareOptions)
    verify: VerifyOptions = field(default_factory=VerifyOptions)

    @property
    def tolerance(self) -> Tolerance | None:
        """Return how far values may differ, None where bits are compared."""
        rtol, atol = self.comparison.rtol, self.comparison.atol
        return None if rtol is None and atol is None else Tolerance(rtol or 0, atol or 0)


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """What the comparison found. ``verify.nbytes`` were read of both sides together.

    ``coverage`` is how much of either side was compared, None where one cannot be read.
    """

    verify: VerifyReport = field(metadata={"key": None})
    other: Location = field(metadata={"key": "path"})
    other_format: str | None = field(metadata={"key": "format"})
    values: int = field(metadata={"key": "values_compared"})
    differing: tuple[DifferingTensor, ...]
    coverage: tuple[Coverage, Coverage] | None


def against(
    path: Location, options: AgainstOptions, started: Started | None = None
) -> AgainstReport:
    """Compare the checkpoint at ``path`` with another; all differences are collected.

    ``started`` is told how many bytes will be read, and returns what is told of them as they are.
    Raises NotFound, Unrecognised or UsageError where there is nothing to compare.
    """
    require_codes(options.verify.ignore)
    comparison = _Comparison(path, options)
    comparison.compare_structure()
    comparison.compare_tensors(started or (lambda total: lambda nbytes: None))
    return comparison.report()


class _Side:
    """One of the two: ``opened`` unless it is damaged, ``catalog`` is what of it is compared."""

    def __init__(self, name: str, path: Location, options: ReadOptions) -> None:
        self.name, self.path = name, path
        self.problems: list[Problem] = []
        self.opened: OpenedCheckpoint | None = None
        self.catalog: Catalog | None = None
        try:
            self.opened = open_checkpoint(path, options, whole=False)
        except (Damaged, Hostile) as error:
            self.problems += error.problems

    def select(self, catalog: Catalog) -> None:
        """Set what is compared, and note what of it is contradictory, unused or not written."""
        self.catalog = catalog
        for name, why in catalog.conflicts.items():
            problem = Problem(why, "ranks-disagree", tensor=name)
            if isinstance(why, Problem) and finding_of(why).severity is Severity.ERROR:
                problem = why
            self.problems.append(problem)
        notes = [note for note in catalog.notes if isinstance(note, Problem)]
        self.problems += [note for note in notes if note.code in ("file-unused", NOT_CARRIED)]

    def readable(self, names: list[str]) -> dict[str, TensorEntry]:
        """Return the tensors of these names with their containers opened, if they can be."""
        if self.opened is None or self.catalog is None:
            return {}
        chosen = {name: self.catalog.tensors[name] for name in names}
        catalog, lost = readable(self.opened, self.catalog.with_tensors(chosen))
        self.problems += lost.values()
        return catalog.tensors

    def findings(self, ignore: tuple[str, ...]) -> tuple[list[Finding], list[Finding]]:
        """Return the findings of this side, and its errors that are ignored."""
        catalog = self.opened.catalog if self.opened else None
        sizes = self.opened.source.files if self.opened else {}
        shown, ignored = Findings(catalog, sizes, ignore).of(self.problems)
        return [f.within(self.name) for f in shown], [f.within(self.name) for f in ignored]


class _Comparison:
    """Two checkpoints, and what was found of them so far."""

    def __init__(self, path: Location, options: AgainstOptions) -> None:
        read, other_format = options.verify.read, options.comparison.other_format
        other = ReadOptions(other_format, per_rank=read.per_rank)
        self._options = options
        self._sides = (_Side(SIDES[0], path, read), _Side(SIDES[1], options.other, other))
        self._problems: list[Problem] = []
        self._differing: list[DifferingTensor] = []
        self._pairs: list[Pair] = []
        self._values = 0
        self._whole_values = 0, 0
        self._made: RewriteResult | None = None
        self._theirs: Counterpart | None = None

    def compare_structure(self) -> None:
        """Compare names, types, shapes and the values besides tensors."""
        one, other = (side.opened for side in self._sides)
        if one is None or other is None:
            return
        try:
            made = rewrite(one, applicable(self._options.rewrite, one.catalog, other.catalog))
        except (Damaged, Hostile) as error:
            self._sides[0].problems += error.problems
            return
        mine, selection = made.catalog, self._options.rewrite.selection
        if not mine.tensors and not mine.objects and not mine.conflicts:
            raise UsageError("nothing is left to compare")
        counter = counterpart(other.catalog, mine, selection)
        theirs = counter.catalog
        self._made, self._theirs = made, counter
        self._problems += excluded_by_rewrite(made, one.path)
        self._problems += excluded(other.path, counter.excluded, counter.excluded_values)
        self._problems += differing_unread(mine, theirs, selection)
        self._compare_values(unfolded(mine, theirs), unfolded(theirs, mine))
        self._problems += differing_companions(one, other, self._options.rewrite.map.assets)
        for side, catalog in zip(self._sides, (mine, theirs), strict=True):
            side.select(catalog)
        alike = [name for name in mine.tensors if self._is_alike(name, mine, theirs)]
        tensors = [side.readable(alike) for side in self._sides]
        both = [name for name in alike if all(name in entries for entries in tensors)]
        cast = self._options.comparison.cast
        self._pairs = [Pair(tensors[0][name], tensors[1][name], cast) for name in both]

    def _compare_values(self, mine: Unfolded, theirs: Unfolded) -> None:
        """Compare names, and the values besides tensors."""
        self._problems += differing_names(mine.catalog, theirs.catalog)
        problems = list(differing_values(mine.catalog, theirs.catalog))
        self._problems += problems
        unread = {problem.tensor for problem in problems if problem.code == "value-not-compared"}
        compared = {*common_values(mine.catalog, theirs.catalog)} - unread
        self._values = len(compared)
        self._whole_values = mine.whole(compared), theirs.whole(compared)

    def _is_alike(self, name: str, mine: Catalog, theirs: Catalog) -> bool:
        """Return whether the values of a tensor can be compared; note types that differ."""
        if name not in theirs.tensors:
            return False
        as_numbers = self._options.tolerance is not None
        problem = differing_type(
            mine.tensors[name],
            theirs.tensors[name],
            cast=self._options.comparison.cast,
            as_numbers=as_numbers,
        )
        self._problems += [problem] if problem is not None else []
        return problem is None

    def compare_tensors(self, started: Started) -> None:
        """Compare every element of the tensors that both sides have."""
        opened = [side.opened for side in self._sides if side.opened and side.catalog]
        if len(opened) < 2:
            return
        workers = self._options.verify.workers or max(each.source.workers for each in opened)
        reads = (CheckedSource(opened[0].source), CheckedSource(opened[1].source))
        progress = started(self._nbytes)
        result = compare(self._pairs, reads, self._options.tolerance, workers, progress)
        for name, (number, error) in result.unreadable.items():
            problems = (p if p.tensor else p.within(name, tensor=name) for p in error.problems)
            self._sides[number].problems += problems
        self._pairs = [pair for pair in self._pairs if pair.one.name not in result.unreadable]
        differences = result.differences
        self._differing = [
            differing_tensor(pair, differences[pair.one.name])
            for pair in self._pairs
            if pair.one.name in differences
        ]
        tensors = [pair.one for pair in self._pairs], [pair.other for pair in self._pairs]
        for side, each, read, entries in zip(self._sides, opened, reads, tensors, strict=True):
            stored = [part for entry in entries for part in stored_tensors(entry)]
            side.problems += _stored_problems(each, read, stored, workers)

    @property
    def _nbytes(self) -> int:
        return sum(pair.nbytes for pair in self._pairs)

    def report(self) -> AgainstReport:
        """Return all that was found, and what it comes to."""
        strict = self._options.verify.strict
        if self._made is not None and not self._is_compared:
            self._problems.append(Problem("no tensor or value was compared", "nothing-compared"))
        findings, ignored = self._findings()
        formats = [side.opened.format.name if side.opened else None for side in self._sides]
        report = VerifyReport(
            self._sides[0].path,
            formats[0],
            tuple(findings),
            ok=True,
            summary="",
            nbytes=self._nbytes,
            tensors=len(self._pairs),
            ignored=tuple(ignored),
        )
        failures = sum(finding.count for finding in report.fails(strict))
        coverage = self._coverage()
        summary = f"{self._summary(failures, coverage)}{ignored_errors(ignored)}"
        ok = not failures and coverage is not None and self._is_compared
        return AgainstReport(
            replace(report, ok=ok, summary=summary),
            self._options.other,
            formats[1],
            self._values,
            tuple(self._differing),
            coverage,
        )

    def _findings(self) -> tuple[list[Finding], list[Finding]]:
        """Return what is wrong between the two and with either side; errors that are ignored."""
        ignore = self._options.verify.ignore
        between = [*self._problems, *(tensor.problem for tensor in self._differing)]
        groups = [Findings(self._sides[0].catalog, {}, ignore).of(between)]
        groups += [side.findings(ignore) for side in self._sides]
        shown = [finding for findings, _ in groups for finding in findings]
        ignored = [finding for _, findings in groups for finding in findings]
        order = list(Severity)
        return sorted(shown, key=lambda each: order.index(each.severity)), ignored

    @property
    def _is_compared(self) -> bool:
        """Return whether anything was compared: tensors, or values where there are no tensors."""
        any_tensor = any(side.catalog and side.catalog.tensors for side in self._sides)
        return bool(self._pairs) or (bool(self._values) and not any_tensor)

    def _coverage(self) -> tuple[Coverage, Coverage] | None:
        other = self._sides[1].opened
        if self._made is None or self._theirs is None or other is None:
            return None
        names = {pair.one.name for pair in self._pairs}
        theirs = {self._theirs.names[name] for name in names}
        return (
            rewritten_coverage(self._made, names, self._whole_values[0]),
            catalog_coverage(other.catalog, theirs, self._whole_values[1]),
        )

    def _summary(self, failures: int, coverage: tuple[Coverage, Coverage] | None) -> str:
        if coverage is None:
            return "FAILED: not compared: damaged"
        if failures or not self._is_compared:
            return f"DIFFERENT: {plural(failures, 'difference')}"
        rests = [
            f"{part.rest} of {side.path}"
            for part, side in zip(coverage, self._sides, strict=True)
            if part.rest != Amount()
        ]
        but = f"; not compared: {', '.join(rests)}" if rests else ""
        return f"EQUAL: {self._what()}{but}"

    def _what(self) -> str:
        """Return what is equal, and how it was compared."""
        how = "within the tolerance" if self._options.tolerance else "bit by bit"
        different = {tensor.name for tensor in self._differing}
        equal = [pair for pair in self._pairs if pair.one.name not in different]
        compared = sum(pair.one.nbytes for pair in equal)
        cast = sum(pair.is_cast for pair in equal)
        once = f", {cast:,} of them cast to the other's type" if cast else ""
        values = f", {plural(self._values, 'non-tensor value')}" if self._values else ""
        return f"{plural(len(equal), 'tensor')} ({compared:,} bytes) {how}{once}{values}"


def _stored_problems(
    opened: OpenedCheckpoint, reads: CheckedSource, entries: list[TensorEntry], workers: int
) -> Iterator[Problem]:
    """Yield wrong checksums of what was read, copies that differ, and files that changed."""
    try:
        yield from reads.problems(entries, workers)
        yield from differing_replicas(entries, opened.source)
    except CkptoolError as error:
        yield from error.problems
    yield from changes(opened.source, [*opened.catalog.files, *opened.catalog.companions])
