"""Whether one checkpoint holds the same as another: names, types, shapes, then every value.

A tensor that differs from its counterpart: where, how, and who holds it on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.options.source import ReadOptions, RewriteOptions
from ckptool.commands.options.verify import CompareOptions, VerifyOptions
from ckptool.commands.rewrite import RewriteResult, rewrite
from ckptool.commands.verify.codes import Severity, require_codes
from ckptool.commands.verify.compare.companions import differing_companions
from ckptool.commands.verify.compare.coverage import (
    Amount,
    Coverage,
    catalog_coverage,
    left_out,
    not_chosen,
    rewritten_coverage,
)
from ckptool.commands.verify.compare.names import (
    Counterpart,
    applicable,
    common_values,
    counterpart,
    differing_names,
    differing_type,
    differing_unread,
    differing_values,
    readable,
    stored_tensors,
)
from ckptool.commands.verify.compare.tensors import Difference, Pair, Tolerance, compare
from ckptool.commands.verify.compare.values import Unfolded, unfolded
from ckptool.commands.verify.findings import (
    SIDES,
    Finding,
    Findings,
    VerifyReport,
    counted,
    finding_of,
    ignored_errors,
)
from ckptool.commands.verify.verify import Progress, Started, changes
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.plan import ChunkIndex
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


def _tolerance(options: CompareOptions) -> Tolerance | None:
    """Return how far values may differ, None where bits are compared."""
    if options.rtol is None and options.atol is None:
        return None
    return Tolerance(options.rtol or 0, options.atol or 0)


def against(
    path: Location, options: AgainstOptions, started: Started | None = None
) -> AgainstReport:
    """Compare the checkpoint at ``path`` with another; all differences are collected.

    ``started`` is told how many bytes will be read, and returns what is told of them as they are.
    Raises NotFound, Unrecognised or UsageError where there is nothing to compare.
    """
    require_codes(options.verify.ignore)
    comparison = _Comparison(path, options)
    comparison.structure()
    comparison.values(started or (lambda total: lambda nbytes: None))
    return comparison.report()


@dataclass(slots=True)
class _Side:
    """One of the two: what is ``chosen``, what of that can be read, and how."""

    where: str
    opened: Opened
    chosen: Catalog
    catalog: Catalog
    reads: CheckedSource


class _Comparison:
    """Two checkpoints, and what was found of them so far."""

    def __init__(self, path: Location, options: AgainstOptions) -> None:
        self._options = options
        self._tolerance = _tolerance(options.comparison)
        self._path = path
        self._problems: list[Problem] = []
        self._side_problems: dict[str, list[Problem]] = {side: [] for side in SIDES}
        self._differing: list[DifferingTensor] = []
        self._pairs: list[Pair] = []
        self._values = 0
        self._whole_values = 0, 0
        self._made: RewriteResult | None = None
        self._theirs: Counterpart | None = None
        here = options.verify.read
        reads = (here, ReadOptions(options.comparison.other_format, per_rank=here.per_rank))
        paths = (path, options.other)
        self._opened = [self._open(*one) for one in zip(paths, reads, SIDES, strict=True)]
        self._sides: list[_Side] = []

    def _open(self, path: Location, options: ReadOptions, where: str) -> Opened | None:
        try:
            return open_checkpoint(path, options, whole=False)
        except (Damaged, Hostile) as error:
            self._side_problems[where] += error.problems
            return None

    def structure(self) -> None:
        """Compare names, types, shapes and the values besides tensors."""
        one, other = self._opened
        if one is None or other is None:
            return
        self._made = made = self._rewritten(one, other.catalog)
        if made is None:
            return
        mine = made.catalog
        if not mine.tensors and not mine.objects and not mine.conflicts:
            raise UsageError("nothing is left to compare")
        selection = self._options.rewrite.selection
        self._theirs = theirs = counterpart(other.catalog, mine, selection)
        self._problems += left_out(made, one.path)
        kept = set(theirs.names.values())
        gone = [entry for name, entry in other.catalog.tensors.items() if name not in kept]
        values = len(other.catalog.objects) - len(theirs.catalog.objects)
        if gone or values:
            self._problems.append(not_chosen(other.path, gone, values))
        self._problems += differing_unread(mine, theirs.catalog, selection)
        self._compare_values(unfolded(mine, theirs.catalog), unfolded(theirs.catalog, mine))
        self._problems += differing_companions(one, other, self._options.rewrite.map.assets)
        self._sides = [self._side(0, one, mine), self._side(1, other, theirs.catalog)]
        self._pair_up(mine, theirs.catalog)

    def _compare_values(self, mine: Unfolded, theirs: Unfolded) -> None:
        """Compare names, and the values besides tensors."""
        self._problems += differing_names(mine.catalog, theirs.catalog)
        found = list(differing_values(mine.catalog, theirs.catalog))
        self._problems += found
        unread = {problem.tensor for problem in found if problem.code == "value-not-compared"}
        compared = {*common_values(mine.catalog, theirs.catalog)} - unread
        self._values = len(compared)
        self._whole_values = mine.whole(compared), theirs.whole(compared)

    def _rewritten(self, one: Opened, theirs: Catalog) -> RewriteResult | None:
        """The first side as it is asked for, None where damage keeps it from being so."""
        try:
            return rewrite(one, applicable(self._options.rewrite, one.catalog, theirs))
        except (Damaged, Hostile) as error:
            self._side_problems[SIDES[0]] += error.problems
            return None

    def _side(self, number: int, opened: Opened, catalog: Catalog) -> _Side:
        for name, why in catalog.conflicts.items():
            problem = Problem(why, "ranks-disagree", tensor=name)
            if isinstance(why, Problem) and finding_of(why).severity is Severity.ERROR:
                problem = why
            self._side_problems[SIDES[number]].append(problem)
        notes = [note for note in catalog.notes if isinstance(note, Problem)]
        remarks = [note for note in notes if note.code in ("file-unused", NOT_CARRIED)]
        self._side_problems[SIDES[number]] += remarks
        return _Side(SIDES[number], opened, catalog, catalog, CheckedSource(opened.source))

    def _pair_up(self, mine: Catalog, theirs: Catalog) -> None:
        """Find the tensors whose values can be compared."""
        alike = [name for name in mine.tensors if self._is_alike(name, mine, theirs)]
        for side in self._sides:
            wanted = {name: side.catalog.tensors[name] for name in alike}
            side.catalog, lost = readable(side.opened, side.catalog.with_tensors(wanted))
            self._side_problems[side.where] += lost.values()
        one, other = (side.catalog.tensors for side in self._sides)
        both = [name for name in alike if name in one and name in other]
        self._pairs = [Pair(one[name], other[name], self._options.comparison.cast) for name in both]

    def _is_alike(self, name: str, mine: Catalog, theirs: Catalog) -> bool:
        """Whether the values of a tensor can be compared; where types differ, that is noted."""
        if name not in theirs.tensors:
            return False
        as_numbers = self._tolerance is not None
        one, other = mine.tensors[name], theirs.tensors[name]
        found = differing_type(
            one, other, cast=self._options.comparison.cast, as_numbers=as_numbers
        )
        self._problems += [found] if found is not None else []
        return found is None

    def values(self, started: Started) -> None:
        """Compare every element of the tensors that both sides have."""
        if not self._sides:
            return
        best = max(side.opened.source.workers for side in self._sides)
        workers, progress = self._options.verify.workers or best, started(self._nbytes)
        self._compare(workers, progress)
        for side in self._sides:
            self._check(side, workers)
            opened = side.opened
            files = [*opened.catalog.files, *opened.catalog.companions]
            self._side_problems[side.where] += changes(opened.source, files)

    @property
    def _nbytes(self) -> int:
        return sum(pair.nbytes for pair in self._pairs)

    def _compare(self, workers: int, progress: Progress) -> None:
        reads = self._sides[0].reads, self._sides[1].reads
        outcome = compare(self._pairs, reads, self._tolerance, workers, progress)
        for name, (side, error) in outcome.unreadable.items():
            problems = (p if p.tensor else p.within(name, tensor=name) for p in error.problems)
            self._side_problems[SIDES[side]] += problems
        self._pairs = [pair for pair in self._pairs if pair.one.name not in outcome.unreadable]
        self._differing = [
            described(pair, outcome.differences[pair.one.name])
            for pair in self._pairs
            if pair.one.name in outcome.differences
        ]

    def _check(self, side: _Side, workers: int) -> None:
        """The checksums of what was read of a side, and its copies that differ from one another."""
        names = {pair.one.name for pair in self._pairs}
        chosen = [entry for name, entry in side.catalog.tensors.items() if name in names]
        entries = [stored for entry in chosen for stored in stored_tensors(entry)]
        problems = self._side_problems[side.where]
        try:
            problems += side.reads.problems(entries, workers)
            problems += differing_replicas(entries, side.opened.source)
        except CkptoolError as error:
            problems += error.problems

    def report(self) -> AgainstReport:
        """All that was found, and what it comes to."""
        options = self._options
        if self._sides and not self._compared:
            self._problems.append(Problem("no tensor or value was compared", "nothing-compared"))
        findings, ignored = self._findings()
        formats = [None if one is None else one.format.name for one in self._opened]
        report = VerifyReport(
            self._path,
            formats[0],
            findings,
            ok=True,
            summary="",
            nbytes=self._nbytes,
            tensors=len(self._pairs),
            ignored=ignored,
        )
        failures = sum(finding.count for finding in report.fails(options.verify.strict))
        coverage = self._coverage()
        ok = not failures and coverage is not None and self._compared
        report = replace(report, ok=ok, summary=self._summary(failures, coverage, ignored))
        return AgainstReport(
            report, options.other, formats[1], self._values, tuple(self._differing), coverage
        )

    def _findings(self) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        """Return what is wrong with either side and between the two; errors that are ignored."""
        ignore = self._options.verify.ignore
        catalog = self._sides[0].chosen if self._sides else None
        differing = [tensor.problem for tensor in self._differing]
        findings, ignored = Findings(catalog, {}, ignore).of([*self._problems, *differing])
        for where, opened in zip(SIDES, self._opened, strict=True):
            sizes = opened.source.files if opened else {}
            catalog = opened.catalog if opened else None
            of_side = Findings(catalog, sizes, ignore).of(self._side_problems[where])
            findings += tuple(finding.within(where) for finding in of_side[0])
            ignored += tuple(finding.within(where) for finding in of_side[1])
        order = list(Severity)
        return tuple(sorted(findings, key=lambda each: order.index(each.severity))), ignored

    @property
    def _compared(self) -> bool:
        """Whether anything was compared: tensors, or values where there are no tensors."""
        any_tensor = any(side.chosen.tensors for side in self._sides)
        return bool(self._pairs) or (bool(self._values) and not any_tensor)

    def _coverage(self) -> tuple[Coverage, Coverage] | None:
        other = self._opened[1]
        if not self._sides or self._made is None or self._theirs is None or other is None:
            return None
        names = {pair.one.name for pair in self._pairs}
        theirs = {self._theirs.names[name] for name in names}
        return (
            rewritten_coverage(self._made, names, self._whole_values[0]),
            catalog_coverage(other.catalog, theirs, self._whole_values[1]),
        )

    def _summary(
        self,
        failures: int,
        coverage: tuple[Coverage, Coverage] | None,
        ignored: tuple[Finding, ...],
    ) -> str:
        if coverage is None:
            return "FAILED: not compared: damaged"
        if failures or not self._compared:
            return f"DIFFERENT: {counted(failures, 'difference')}{ignored_errors(ignored)}"
        rests = [
            f"{one.rest} of {path}"
            for one, path in zip(coverage, (self._path, self._options.other), strict=True)
            if one.rest != Amount()
        ]
        but = f"; not compared: {', '.join(rests)}" if rests else ""
        return f"EQUAL: {self._what()}{but}{ignored_errors(ignored)}"

    def _what(self) -> str:
        """Return what is equal, and how it was compared."""
        how = "within the tolerance" if self._tolerance else "bit by bit"
        different = {tensor.name for tensor in self._differing}
        equal = [pair for pair in self._pairs if pair.one.name not in different]
        compared = sum(pair.one.nbytes for pair in equal)
        cast = sum(pair.is_cast for pair in equal)
        once = f", {cast:,} of them cast to the other's type" if cast else ""
        values = f", {counted(self._values, 'non-tensor value')}" if self._values else ""
        return f"{counted(len(equal), 'tensor')} ({compared:,} bytes) {how}{once}{values}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an element: the file, and the rank that wrote it if known."""

    file: str
    rank: int | None

    def __str__(self) -> str:
        return self.file if self.rank is None else f"rank {self.rank}, {self.file}"


@dataclass(frozen=True, slots=True)
class DifferingTensor:
    """A tensor whose values differ: how, and who holds the first differing element, A and B.

    ``elements`` is the number of all elements of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    difference: Difference
    holders: tuple[Holder, Holder]

    @property
    def problem(self) -> Problem:
        """The difference in one line."""
        found = self.difference
        largest = "" if found.largest is None else f", largest difference {found.largest:.6g}"
        message = (
            f"{self.name}: {found.elements:,} of {self.elements:,} elements differ, first at"
            f" {list(found.first)}: A {found.values[0]} ({self.holders[0]}),"
            f" B {found.values[1]} ({self.holders[1]}){largest}"
        )
        return Problem(message, "tensor-differs", file=self.holders[0].file, tensor=self.name)


def described(pair: Pair, difference: Difference) -> DifferingTensor:
    """The difference of a pair, with the holders of its first element."""
    one, other = (_holder(entry, difference.first) for entry in (pair.one, pair.other))
    entry = pair.one
    return DifferingTensor(entry.name, entry.shape, entry.elements, difference, (one, other))


def _holder(entry: TensorEntry, at: tuple[int, ...]) -> Holder:
    chunk, _ = next(ChunkIndex(entry).find(Box.at(at, (1,) * len(at))))
    return Holder(chunk.at.file, chunk.rank)
