"""Whether one checkpoint holds the same as another: names, types, shapes, then every value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.read_options import ReadOptions
from ckptool.commands.selection import EVERYTHING, Selection, selected
from ckptool.commands.verify.codes import finding_of, require_codes
from ckptool.commands.verify.compare import Pair, Tolerance, compare
from ckptool.commands.verify.differing import DifferingTensor, described
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.readable import readable
from ckptool.commands.verify.structure import (
    common_values,
    counterpart,
    differing_names,
    differing_type,
    differing_values,
    unread_notes,
)
from ckptool.commands.verify.verify import Progress, Started, VerifyOptions
from ckptool.core import rewrite
from ckptool.core.catalog import Catalog
from ckptool.engine.checked import CheckedReads
from ckptool.engine.remote_path import Location
from ckptool.engine.replicas import differing_replicas
from ckptool.errors import CkptoolError, Damaged, Hostile, Problem, UsageError

SIDES = ("here", "there")


@dataclass(frozen=True, slots=True)
class AgainstOptions:
    """What to compare with, of what, and how.

    The selection applies to the first side. Without a ``tolerance`` and without ``cast``, element
    types must be equal and values are compared bit by bit. Of ``verify.read``, only ``per_rank``
    applies to the other side too; ``other_format`` is the format to read that as.
    """

    other: Location
    selection: Selection = EVERYTHING
    tolerance: Tolerance | None = None
    cast: bool = False
    verify: VerifyOptions = field(default_factory=VerifyOptions)
    other_format: str | None = None


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """What the comparison found. ``verify.nbytes`` were read of both sides together."""

    verify: VerifyReport
    other: Location
    other_format: str | None
    values: int
    differing: tuple[DifferingTensor, ...]


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
    """One of the two: what is chosen of it, what of that can be read, and how it is read."""

    where: str
    opened: Opened
    catalog: Catalog
    reads: CheckedReads


class _Comparison:
    """Two checkpoints, and what was found of them so far."""

    def __init__(self, path: Location, options: AgainstOptions) -> None:
        self._options = options
        self._path = path
        self._found: list[Problem] = []
        self._differing: list[DifferingTensor] = []
        self._pairs: list[Pair] = []
        self._values = 0
        here = options.verify.read
        reads = (here, ReadOptions(options.other_format, per_rank=here.per_rank))
        paths = (path, options.other)
        self._opened = [self._open(*one) for one in zip(paths, reads, SIDES, strict=True)]
        self._sides: list[_Side] = []

    def _open(self, path: Location, options: ReadOptions, where: str) -> Opened | None:
        try:
            return open_checkpoint(path, options)
        except (Damaged, Hostile) as error:
            self._note(where, error.problems)
            return None

    def _note(self, where: str, problems: Iterable[Problem]) -> None:
        self._found += [problem.within(where) for problem in problems]

    def structure(self) -> None:
        """Compare names, types, shapes and the values besides tensors."""
        one, other = self._opened
        if one is None or other is None:
            return
        mine = selected(one.catalog, self._selection(one.catalog, other.catalog))
        theirs, left = counterpart(other.catalog, mine, self._options.selection)
        if not mine.tensors and not mine.objects and not mine.conflicts:
            raise UsageError("nothing is left to compare")
        if left:
            message = f"{left:,} names of {other.path} are not in what was chosen"
            self._found.append(Problem(message, "not-chosen"))
        self._found += differing_names(mine, theirs)
        self._found += differing_values(mine, theirs)
        self._values = len(common_values(mine, theirs))
        self._sides = [self._side(0, one, mine), self._side(1, other, theirs)]
        self._pair_up(mine, theirs)

    def _selection(self, mine: Catalog, theirs: Catalog) -> Selection:
        """What is asked, without what is to be dropped and only the other side has."""
        asked = self._options.selection
        unused = [glob for glob in asked.drop if not rewrite.is_used(mine, glob)]
        only = {glob for glob in unused if rewrite.is_used(theirs, glob)}
        return replace(asked, drop=tuple(glob for glob in asked.drop if glob not in only))

    def _side(self, number: int, opened: Opened, catalog: Catalog) -> _Side:
        for name, why in catalog.conflicts.items():
            self._note(SIDES[number], [Problem(why, "ranks-disagree", tensor=name)])
        for note in unread_notes(catalog):
            self._note(SIDES[number], [Problem(note, "value-not-compared", tensor=note.tensor)])
        return _Side(SIDES[number], opened, catalog, CheckedReads(opened.source))

    def _pair_up(self, mine: Catalog, theirs: Catalog) -> None:
        """Find the tensors whose values can be compared."""
        alike = [name for name in mine.tensors if self._is_alike(name, mine, theirs)]
        if not alike and not self._values:
            self._found.append(Problem("no name of the one is in the other", "nothing-compared"))
        for side in self._sides:
            wanted = {name: side.catalog.tensors[name] for name in alike}
            side.catalog, lost = readable(side.opened, side.catalog.with_tensors(wanted))
            self._note(side.where, lost.values())
        one, other = (side.catalog.tensors for side in self._sides)
        both = [name for name in alike if name in one and name in other]
        self._pairs = [Pair(one[name], other[name], self._options.cast) for name in both]

    def _is_alike(self, name: str, mine: Catalog, theirs: Catalog) -> bool:
        """Whether the values of a tensor can be compared; where types differ, that is noted."""
        if name not in theirs.tensors:
            return False
        as_numbers = self._options.cast or self._options.tolerance is not None
        one, other = mine.tensors[name], theirs.tensors[name]
        found = differing_type(one, other, as_numbers=as_numbers)
        self._found += [found] if found is not None else []
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

    @property
    def _nbytes(self) -> int:
        return sum(pair.nbytes for pair in self._pairs)

    def _compare(self, workers: int, progress: Progress) -> None:
        reads = self._sides[0].reads, self._sides[1].reads
        found = compare(self._pairs, reads, self._options.tolerance, workers, progress)
        for name, error in found.unreadable.items():
            self._note(name, error.problems)
        self._differing = [
            described(pair, found.differences[pair.one.name])
            for pair in self._pairs
            if pair.one.name in found.differences
        ]

    def _check(self, side: _Side, workers: int) -> None:
        """The checksums of what was read of a side, and its copies that differ from one another."""
        names = {pair.one.name for pair in self._pairs}
        entries = [entry for name, entry in side.catalog.tensors.items() if name in names]
        try:
            self._note(side.where, side.reads.problems(entries, workers))
            self._note(side.where, differing_replicas(entries, side.opened.source))
        except CkptoolError as error:
            self._note(side.where, error.problems)

    def report(self) -> AgainstReport:
        """All that was found, and what it comes to."""
        options = self._options
        problems = [*self._found, *(tensor.problem for tensor in self._differing)]
        ignored = options.verify.ignore
        findings = tuple(finding_of(one) for one in problems if one.code not in ignored)
        formats = [None if one is None else one.format.name for one in self._opened]
        report = VerifyReport(
            self._path,
            formats[0],
            findings,
            sound=True,
            sentence="",
            nbytes=self._nbytes,
            tensors=len(self._pairs),
        )
        failures = len(report.fails(options.verify.strict))
        report = replace(report, sound=not failures, sentence=self._sentence(report, failures))
        return AgainstReport(
            report, options.other, formats[1], self._values, tuple(self._differing)
        )

    def _sentence(self, report: VerifyReport, failures: int) -> str:
        if not self._sides:
            return "Not compared; what is damaged cannot be."
        if failures:
            return f"Not the same; {_counted(failures, 'difference')}."
        how = "within the tolerance" if self._options.tolerance else "bit by bit"
        cast = ", cast to the other's type" if self._options.cast else ""
        told = f"{_counted(report.tensors, 'tensor')} {how}{cast}"
        values = f", {_counted(self._values, 'value')} besides" if self._values else ""
        skipped = {"value-not-compared", "values-not-held"} & {f.code for f in report.findings}
        but = ", as far as they can be compared" if skipped else ""
        return f"The same{but}: {told}{values}."


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
