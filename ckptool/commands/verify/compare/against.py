"""Whether one checkpoint equals another: names, types, shapes, then every value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.document import Report, document, plain
from ckptool.commands.open import PART_NAMED, OpenedCheckpoint, Opens, open_checkpoint
from ckptool.commands.options.question import Question
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.verify.checks.consistency import conflict_problems
from ckptool.commands.verify.codes import is_error, require_codes
from ckptool.commands.verify.compare.coverage import (
    NOT_COMPARED,
    Alignment,
    Amount,
    Coverage,
    align,
    cast_text,
    catalog_coverage,
    list_unread,
    rewritten_coverage,
)
from ckptool.commands.verify.compare.names import (
    common_values,
    differing_companions,
    differing_names,
    differing_type,
    differing_values,
    nothing_compared,
    readable,
    stored_problems,
)
from ckptool.commands.verify.compare.values import Unfolded, unfolded
from ckptool.commands.verify.findings import (
    SIDES,
    Finding,
    Findings,
    VerifyReport,
)
from ckptool.commands.verify.verification import changes
from ckptool.core.casts import RangeCounts, as_type, is_computed
from ckptool.core.catalog import Catalog
from ckptool.core.text import plural
from ckptool.engine.check.difference import DifferingTensor, differing_tensor
from ckptool.engine.check.pairs import TensorPair
from ckptool.engine.check.tensors import compare
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.tensors import CheckedSource
from ckptool.errors import UNREAD, Damaged, Hostile, Problem, UsageError
from ckptool.formats import torch_save
from ckptool.formats.lightning import named_as_one_file
from ckptool.serialization.state_dict.values import NOT_CARRIED
from ckptool.storage.url import Location

_SAID = ("file-unused", "checkpoint-nested", NOT_CARRIED, PART_NAMED)
"""The codes of a scan's notes that are findings on a side."""
_AS_THEY_ARE = {"whole": False, "placements": False}


class AgainstReport(Report, frozen=True):
    """The result of the comparison; true if both are equal.

    ``verify.nbytes`` were read from both sides together. ``coverage`` is how much of either side
    was compared, None if one cannot be read.
    """

    verify: VerifyReport = field(name="_verify")
    other: Location = field(name="path")
    other_format: str | None = field(name="format")
    values: int = field(name="values_compared")
    differing: tuple[DifferingTensor, ...]
    coverage: tuple[Coverage, Coverage] | None

    schema: ClassVar = "verify"

    @property
    def ok(self) -> bool:
        """Return whether both are equal, as far as requested."""
        return self.verify.ok

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints: the findings, with the comparison under ``against``."""
        compared = plain(self) | {"tensors_compared": self.verify.tensors}
        if self.coverage is not None:
            compared["coverage"] = dict(zip("ab", compared["coverage"], strict=True))
        return document(self.schema, self.verify, against=compared)

    def _short(self) -> dict[str, Any]:
        answer = {"ok": self.ok, "summary": self.verify.summary}
        return {"path": str(self.verify.path)} | Report._short(self) | answer


def against(
    path: Location, other: Location, question: Question, progress: Progress = UNWATCHED
) -> AgainstReport:
    """Compare the checkpoint at ``path`` with another; all differences are collected.

    The first side is rewritten as by ``convert`` before it is compared, so that with the same
    options an export equals its source. Of how that is read, only ``per_rank`` applies to the other
    side too. Raises NotFound, Unrecognized or UsageError if there is nothing to compare.
    """
    read = question.check.read
    require_codes(question.check.ignore)
    one = Side(SIDES[0], path, lambda: open_checkpoint(path, read, **_AS_THEY_ARE))
    two = other_side(other, question)
    if torch_save.FORMAT.name in (one.format, two.format) and one.format != two.format:
        one.rename_as_one_file()
        two.rename_as_one_file()
    return Comparison((one, two), question).run(progress)


def other_side(place: Location, question: Question) -> Side:
    """Return the side that is compared with the first, which opens what it can."""
    read = ReadOptions(question.comparison.other_format, per_rank=question.check.read.per_rank)
    return Side(SIDES[1], place, lambda: open_checkpoint(place, read, **_AS_THEY_ARE))


class Side:
    """One side: ``opened`` unless it is damaged; ``catalog`` is the part that is compared."""

    def __init__(
        self, name: str, path: Location, open_side: Callable[[], OpenedCheckpoint]
    ) -> None:
        self.name, self.path = name, path
        self.problems: list[Problem] = []
        self.opened: OpenedCheckpoint | None = None
        self.catalog: Catalog | None = None
        try:
            self.opened = open_side()
        except (Damaged, Hostile) as error:
            self.problems += error.problems

    @property
    def format(self) -> str | None:
        """The name of its format; None if it cannot be read."""
        return None if self.opened is None else self.opened.format.name

    def rename_as_one_file(self) -> None:
        """Rename Lightning's tensors and values as in a checkpoint of one file."""
        if self.opened is not None:
            self.opened = replace(self.opened, catalog=named_as_one_file(self.opened.catalog))

    def select(self, catalog: Catalog) -> None:
        """Set what is compared, and note what of it is contradictory, unused or not written."""
        self.catalog = catalog
        for problem in map(_as_error, conflict_problems(catalog)):
            fails = is_error(problem.code)
            self.problems.append(problem if fails else problem.recoded("ranks-disagree"))
        notes = [note for note in catalog.notes if isinstance(note, Problem)]
        self.problems += [note for note in notes if note.code in _SAID]

    def readable(self, names: list[str]) -> Catalog:
        """Return the named tensors with their containers opened; note which cannot be read.

        A tensor that consists of others is replaced by those, and by the values beside them.
        """
        if self.opened is None or self.catalog is None:
            return Catalog("", {}, {}, {})
        chosen = {name: self.catalog.tensors[name] for name in names}
        chosen_catalog = replace(self.catalog, tensors=chosen, objects={})
        catalog, failures = readable(self.opened, chosen_catalog, Opens.LATE_IN_STORES)
        self.problems += map(_as_error, failures.values())
        return catalog

    def findings(self, ignore: tuple[str, ...]) -> tuple[list[Finding], list[Finding]]:
        """Return the findings of this side, and its ignored errors."""
        catalog = self.opened.catalog if self.opened else None
        sizes = self.opened.source.files if self.opened else {}
        shown, ignored = Findings(catalog, sizes, ignore).of(self.problems)
        return [f.within(self.name) for f in shown], [f.within(self.name) for f in ignored]


def _as_error(problem: Problem) -> Problem:
    """Return a tensor of an unsupported kind as one that is not compared, which is an error."""
    return problem.recoded(NOT_COMPARED) if problem.code == UNREAD else problem


class Comparison(Struct):
    """Two checkpoints, and the findings so far.

    ``matches`` are the names of tensors whose values can be compared, ``inner`` those of the parts
    that some of these consist of; ``pairs`` are the tensors that were compared, ``differing`` those
    whose values differ. ``alignment`` is None if a side cannot be read.
    """

    sides: tuple[Side, Side]
    question: Question
    problems: list[Problem] = field(default_factory=list)
    matches: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    differing: list[DifferingTensor] = field(default_factory=list)
    pairs: list[TensorPair] = field(default_factory=list)
    values: int = 0
    whole_values: tuple[int, int] = (0, 0)
    beyond: RangeCounts = field(default_factory=Counter)
    alignment: Alignment | None = None

    def run(self, progress: Progress) -> AgainstReport:
        """Compare everything, and return the report."""
        self.compare_structure()
        self.compare_content(progress)
        return self.report()

    def compare_structure(self) -> None:
        """Compare names, types, shapes and non-tensor values; no data is read."""
        one, other = (side.opened for side in self.sides)
        if one is None or other is None:
            return
        try:
            alignment = align(one, self.question.rewrite, other.catalog, other.path)
        except (Damaged, Hostile) as error:
            self.sides[0].problems += error.problems
            return
        catalogs = alignment.result.catalog, alignment.counterpart.catalog
        if not any((catalogs[0].tensors, catalogs[0].objects, catalogs[0].conflicts)):
            raise UsageError("nothing is left to compare")
        self.alignment = alignment
        self.problems += [*alignment.notes, *alignment.differences]
        self._compare_values(unfolded(*catalogs), unfolded(*catalogs[::-1]))
        for side, catalog in zip(self.sides, catalogs, strict=True):
            side.select(catalog)
        self.matches = [name for name in catalogs[0].tensors if self._is_match(name, *catalogs)]

    def _open_pairs(self) -> None:
        """Open the containers of the tensors whose values can be compared."""
        one, other = (side.readable(self.matches) for side in self.sides)
        self._compare_inner(one, other)
        casts = self.question.comparison.cast
        for name in [*self.matches, *self.inner]:
            if name in one.tensors and name in other.tensors:
                first, second = one.tensors[name], other.tensors[name]
                if casts and is_computed(first):
                    first = as_type(first, second.dtype)  # rounded once, as by convert
                is_cast = casts and first.dtype != second.dtype
                self.pairs.append(TensorPair(first, second, is_cast))

    def _compare_inner(self, one: Catalog, other: Catalog) -> None:
        """Compare the names, types and values of the parts that tensors consist of."""
        wholes = {*self.matches}
        parts = [
            replace(catalog, tensors={n: e for n, e in catalog.tensors.items() if n not in wholes})
            for catalog in (one, other)
        ]
        self.problems += differing_names(*parts)
        self.problems += differing_values(*parts)
        self.inner = [name for name in parts[0].tensors if self._is_match(name, *parts)]

    def _compare_values(self, one: Unfolded, other: Unfolded) -> None:
        """Compare names, and non-tensor values."""
        self.problems += differing_names(one.catalog, other.catalog)
        problems = list(differing_values(one.catalog, other.catalog))
        self.problems += problems
        unread = {problem.tensor for problem in problems if problem.code == "value-not-compared"}
        compared = {*common_values(one.catalog, other.catalog)} - unread
        self.values = len(compared)
        self.whole_values = one.whole(compared), other.whole(compared)

    def _is_match(self, name: str, one: Catalog, other: Catalog) -> bool:
        """Return whether the values of a tensor can be compared; note differing types."""
        if name not in other.tensors:
            return False
        problem = differing_type(one.tensors[name], other.tensors[name], self.question.comparison)
        self.problems += [problem] if problem is not None else []
        return problem is None

    def compare_content(self, progress: Progress) -> None:
        """Compare files beside the tensors, and every element of the common tensors."""
        opened = [side.opened for side in self.sides if side.opened and side.catalog]
        if len(opened) < 2:
            return
        self.problems += differing_companions(opened[0], opened[1], self.question.rewrite)
        self._open_pairs()
        workers = self.question.check.workers or max(side.source.policy.workers for side in opened)
        reads = (CheckedSource(opened[0].source), CheckedSource(opened[1].source))
        progress.begin(self._nbytes)
        tolerance = self.question.comparison.tolerance
        result = compare(self.pairs, reads, tolerance, workers, progress)
        self.beyond = result.ranges.counts
        for name, (number, error) in result.unreadable.items():
            causes = (p if p.tensor else p.within(name, tensor=name) for p in error.problems)
            problems = self.sides[number].problems  # one item that is opened late names all others
            problems += [cause for cause in causes if cause not in problems]
        self.pairs = [pair for pair in self.pairs if pair.one.name not in result.unreadable]
        self.differing = [
            differing_tensor(pair, result.differences[pair.one.name])
            for pair in self.pairs
            if pair.one.name in result.differences
        ]
        tensors = [pair.one for pair in self.pairs], [pair.other for pair in self.pairs]
        for side, checkpoint, read, entries in zip(self.sides, opened, reads, tensors, strict=True):
            side.problems += stored_problems(read, entries, workers)
            files = checkpoint.catalog.files | checkpoint.catalog.companions
            side.problems += changes(checkpoint.source, files)

    @property
    def _nbytes(self) -> int:
        return sum(pair.nbytes for pair in self.pairs)

    def report(self) -> AgainstReport:
        """Return the report of all findings."""
        any_tensor = any(side.catalog and side.catalog.tensors for side in self.sides)
        is_compared = self.pairs or (self.values and not any_tensor)
        if (alignment := self.alignment) is not None and not is_compared:
            catalogs = alignment.result.catalog, alignment.counterpart.catalog
            self.problems.append(nothing_compared(*catalogs, has_matches=bool(self.matches)))
        findings, ignored = self.findings()
        formats = [side.opened.format.name if side.opened else None for side in self.sides]
        report = VerifyReport(
            self.sides[0].path,
            formats[0],
            tuple(findings),
            nbytes=self._nbytes,
            tensors=len(self.pairs),
            ignored=tuple(ignored),
        )
        strict = self.question.check.strict
        failures = report.count_failures(strict)
        coverage = self._coverage()
        summary = self._summary(failures, coverage, list_unread(report.fails(strict)))
        summary += report.ignored_text
        return AgainstReport(
            replace(report, ok=not failures and coverage is not None, summary=summary),
            self.sides[1].path,
            formats[1],
            self.values,
            tuple(self.differing),
            coverage,
        )

    def findings(self) -> tuple[list[Finding], list[Finding]]:
        """Return the problems between the two and of either side, and the ignored errors."""
        ignore = self.question.check.ignore
        between = [*self.problems, *(tensor.problem for tensor in self.differing)]
        groups = [Findings(self.sides[0].catalog, {}, ignore).of(between)]
        groups += [side.findings(ignore) for side in self.sides]
        shown = [finding for findings, _ in groups for finding in findings]
        ignored = [finding for _, findings in groups for finding in findings]
        return sorted(shown, key=lambda finding: finding.severity.place), ignored

    def _coverage(self) -> tuple[Coverage, Coverage] | None:
        alignment, other = self.alignment, self.sides[1].opened
        if alignment is None or other is None:
            return None
        compared = {pair.one.name for pair in self.pairs}
        inner = self.inner
        wholes = {name for name in self.matches if any(n.startswith(f"{name}.") for n in inner)}
        names = compared - {*inner} | wholes
        other_names = {alignment.counterpart.names[name] for name in names}
        return (
            rewritten_coverage(alignment.result, names, self.whole_values[0]),
            catalog_coverage(other.catalog, other_names, self.whole_values[1]),
        )

    def _summary(
        self, failures: int, coverage: tuple[Coverage, Coverage] | None, unread: set[str]
    ) -> str:
        if coverage is None:
            return "FAILED: not compared: damaged"
        if unread:
            return f"FAILED: not compared: {plural(len(unread), 'tensor')} of an unsupported kind"
        if failures:
            return f"DIFFERENT: {plural(failures, 'difference')}"
        rests = [
            f"{part.rest} of {side.path}"
            for part, side in zip(coverage, self.sides, strict=True)
            if part.rest != Amount()
        ]
        but = f"; not compared: {', '.join(rests)}" if rests else ""
        return f"EQUAL: {self._equal_text()}{but}"

    def _equal_text(self) -> str:
        """Return what is equal, and how it was compared."""
        is_exact = self.question.comparison.tolerance is None
        how = "bit by bit" if is_exact else "within the tolerance"
        different = {tensor.name for tensor in self.differing}
        equal = [pair for pair in self.pairs if pair.one.name not in different]
        compared = sum(pair.one.nbytes for pair in equal)
        once = cast_text(equal, self.beyond.total())
        values = f", {plural(self.values, 'non-tensor value')}" if self.values else ""
        return f"{plural(len(equal), 'tensor')} ({compared:,} bytes) {how}{once}{values}"
