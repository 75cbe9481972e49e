"""Whether one checkpoint holds the same as another: names, types, shapes, then every value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptool.commands.convert import chosen
from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.verify.compare import (
    Difference,
    Pair,
    Progress,
    Tolerance,
    compare,
)
from ckptool.commands.verify.findings import Finding, Severity, VerifyReport
from ckptool.commands.verify.readable import readable
from ckptool.commands.verify.structure import (
    common_values,
    counterpart,
    differing_names,
    differing_type,
    differing_values,
    unread_notes,
)
from ckptool.core import rewrite
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.plan import ChunkIndex
from ckptool.engine.checked import CheckedReads
from ckptool.engine.replicas import differing_replicas
from ckptool.engine.run import RunOptions
from ckptool.errors import CkptoolError, Damaged, Hostile, Problem, UsageError

SIDES = ("here", "there")


@dataclass(frozen=True, slots=True)
class AgainstOptions:
    """What to compare with, of what, and how.

    The choice of names is that of convert, and applies to the first side. Without a ``tolerance``
    and without ``cast``, element types must be equal and values are compared bit by bit.
    """

    other: Path
    format_name: str | None = None
    per_rank: bool = False
    select: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    model_only: bool = False
    strip_prefix: str | None = None
    rename: tuple[str, ...] = ()
    tolerance: Tolerance | None = None
    cast: bool = False
    strict: bool = False
    ignore: tuple[str, ...] = ()
    run: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an element: the file, and the rank that wrote it if known."""

    file: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class DifferingTensor:
    """A tensor whose values differ: how, and who holds the first differing element, here and there.

    ``elements`` is the number of all elements of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    difference: Difference
    holders: tuple[Holder, Holder]


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """What the comparison found. ``nbytes`` were compared, as stored on the first side."""

    verify: VerifyReport
    other: Path
    other_format: str | None
    tensors: int
    values: int
    nbytes: int
    differing: tuple[DifferingTensor, ...]


@dataclass(slots=True)
class _Side:
    """One of the two: what is chosen of it, what of that can be read, and how it is read."""

    where: str
    opened: Opened
    catalog: Catalog
    reads: CheckedReads


class Comparison:
    """Two checkpoints whose structure is compared; ``run`` compares the values.

    Raises NotFound, Unrecognised or UsageError where there is nothing to compare.
    """

    def __init__(self, path: Path, options: AgainstOptions) -> None:
        self._path = path
        self._options = options
        self._findings: list[Finding] = []
        self._sides: tuple[_Side, _Side] | None = None
        self._pairs: list[Pair] = []
        self._values = 0
        opened = [
            self._open(one, where) for one, where in zip((path, options.other), SIDES, strict=True)
        ]
        self._formats = [one.format.name if one is not None else None for one in opened]
        if opened[0] is not None and opened[1] is not None:
            self._compare_structure(opened[0], opened[1])

    @property
    def nbytes(self) -> int:
        """Bytes that ``run`` reads."""
        return sum(pair.nbytes for pair in self._pairs)

    def run(self, progress: Progress = lambda nbytes: None) -> AgainstReport:
        """Compare every value of the tensors that both sides have."""
        differing: list[DifferingTensor] = []
        if self._sides is not None:
            differing = self._compare_values(self._sides, progress)
        return self._report(differing)

    # Structure

    def _open(self, path: Path, where: str) -> Opened | None:
        options = self._options
        name = options.format_name if where == SIDES[0] else None
        try:
            return open_checkpoint(path, format_name=name, per_rank=options.per_rank)
        except (Damaged, Hostile) as error:
            self._add_problems(where, error.problems, error.hint)
            return None

    def _compare_structure(self, one: Opened, other: Opened) -> None:
        mine = chosen(one.catalog, self._choice(one.catalog, other.catalog))
        theirs, left = counterpart(other.catalog, mine, self._options)
        if not mine.tensors and not mine.objects and not mine.conflicts:
            raise UsageError("nothing is left to compare")
        if left:
            self._add(
                "not-selected",
                f"{left:,} names of {other.path} are outside what was chosen",
                Severity.INFO,
            )
        self._findings += differing_names(mine, theirs)
        self._findings += differing_values(mine, theirs)
        self._values = len(common_values(mine, theirs))
        sides = (self._side(0, one, mine), self._side(1, other, theirs))
        alike = [name for name in mine.tensors if self._is_alike(name, mine, theirs)]
        for side in sides:
            self._open_containers(side, alike)
        found = [side.catalog.tensors for side in sides]
        self._pairs = [
            Pair(found[0][name], found[1][name], self._options.cast)
            for name in alike
            if name in found[0] and name in found[1]
        ]
        self._sides = sides
        if not alike and not self._values:
            self._add(
                "nothing-compared",
                "the two have no tensor and no value in common",
                hint="--model-only, --strip-prefix and --rename change the names on this side",
            )

    def _choice(self, mine: Catalog, theirs: Catalog) -> AgainstOptions:
        """What is asked, without what is to be dropped and only the other side has."""
        unused = [glob for glob in self._options.drop if not rewrite.is_used(mine, glob)]
        only = {glob for glob in unused if rewrite.is_used(theirs, glob)}
        drop = tuple(glob for glob in self._options.drop if glob not in only)
        return replace(self._options, drop=drop)

    def _is_alike(self, name: str, mine: Catalog, theirs: Catalog) -> bool:
        """Whether the values of a tensor can be compared; where types differ, that is noted."""
        if name not in theirs.tensors:
            return False
        as_numbers = self._options.cast or self._options.tolerance is not None
        one, other = mine.tensors[name], theirs.tensors[name]
        found = differing_type(one, other, as_numbers=as_numbers)
        self._findings += [found] if found is not None else []
        return found is None

    def _side(self, number: int, opened: Opened, catalog: Catalog) -> _Side:
        for name, why in catalog.conflicts.items():
            self._add("ranks-differ", f"{SIDES[number]}: {why}", tensor=name)
        for note in unread_notes(catalog):
            message = f"{SIDES[number]}: {note}"
            self._add("value-not-compared", message, Severity.WARNING, tensor=note.tensor)
        return _Side(SIDES[number], opened, catalog, CheckedReads(opened.source.root))

    def _open_containers(self, side: _Side, names: Iterable[str]) -> None:
        """Keep of a side what can be read of these tensors."""
        wanted = {name: side.catalog.tensors[name] for name in names}
        side.catalog, lost = readable(side.opened, side.catalog.with_tensors(wanted))
        self._add_problems(side.where, lost.values())

    # Values

    def _compare_values(
        self, sides: tuple[_Side, _Side], progress: Progress
    ) -> list[DifferingTensor]:
        options = self._options
        workers = options.run.workers
        reads = sides[0].reads, sides[1].reads
        found = compare(self._pairs, reads, options.tolerance, workers, progress)
        for name, error in found.unreadable.items():
            self._add_problems(name, error.problems, error.hint)
        for side in sides:
            self._check_side(side)
        return [
            _described(pair, found.differences[pair.one.name])
            for pair in self._pairs
            if pair.one.name in found.differences
        ]

    def _check_side(self, side: _Side) -> None:
        """The checksums of what was read, and copies that differ among themselves."""
        names = {pair.one.name for pair in self._pairs}
        entries = [entry for name, entry in side.catalog.tensors.items() if name in names]
        try:
            for problem in side.reads.problems(entries, self._options.run.workers):
                self._add("crc-mismatch", f"{side.where}: {problem}")
            for problem in differing_replicas(entries, side.opened.source.root):
                self._add("replicas-differ", f"{side.where}: {problem}")
        except CkptoolError as error:
            self._add_problems(side.where, error.problems, error.hint)

    # Report

    def _add_problems(
        self, where: str, problems: Iterable[Problem], hint: str | None = None
    ) -> None:
        self._findings += [
            Finding(one.code, Severity.ERROR, f"{where}: {one}", one.file, one.tensor, hint)
            for one in problems
        ]

    def _add(
        self,
        code: str,
        message: str,
        severity: Severity = Severity.ERROR,
        *,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        self._findings.append(Finding(code, severity, message, None, tensor, hint))

    def _report(self, differing: list[DifferingTensor]) -> AgainstReport:
        options = self._options
        findings = [*self._findings, *map(_finding, differing)]
        kept = tuple(finding for finding in findings if finding.code not in options.ignore)
        failing = (Severity.ERROR, Severity.WARNING) if options.strict else (Severity.ERROR,)
        same = not any(finding.severity in failing for finding in kept)
        nbytes = sum(pair.one.elements * pair.one.source_dtype.itemsize for pair in self._pairs)
        report = VerifyReport(
            self._path, self._formats[0], kept, same, self._sentence(kept, same, failing)
        )
        return AgainstReport(
            report,
            options.other,
            self._formats[1],
            len(self._pairs),
            self._values,
            nbytes,
            tuple(differing),
        )

    def _sentence(
        self, findings: tuple[Finding, ...], same: bool, failing: tuple[Severity, ...]
    ) -> str:
        if self._sides is None:
            return "Not compared: what is damaged cannot be."
        if not same:
            count = sum(finding.severity in failing for finding in findings)
            return f"Not the same: {_counted(count, 'difference')}."
        how = "within the tolerance" if self._options.tolerance else "bit by bit"
        cast = ", cast to the other's type" if self._options.cast else ""
        skipped = any(finding.code == "value-not-compared" for finding in findings)
        but = ", as far as they can be compared" if skipped else ""
        return (
            f"The same{but}: {_counted(len(self._pairs), 'tensor')} {how}{cast},"
            f" {_counted(self._values, 'value')} besides."
        )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _described(pair: Pair, difference: Difference) -> DifferingTensor:
    one, other = (_holder(entry, difference.first) for entry in (pair.one, pair.other))
    entry = pair.one
    return DifferingTensor(entry.name, entry.shape, entry.elements, difference, (one, other))


def _holder(entry: TensorEntry, at: tuple[int, ...]) -> Holder:
    chunk, _ = next(ChunkIndex(entry).find(Box.at(at, (1,) * len(at))))
    return Holder(chunk.at.file, chunk.rank)


def _finding(tensor: DifferingTensor) -> Finding:
    found = tensor.difference
    largest = "" if found.largest is None else f", largest difference {found.largest:.6g}"
    held = " / ".join(map(_told, tensor.holders))
    return Finding(
        "tensor-differs",
        Severity.ERROR,
        f"{tensor.name}: {found.elements:,} of {tensor.elements:,} elements differ, first at"
        f" {list(found.first)} ({found.values[0]} here, {found.values[1]} there){largest}; {held}",
        tensor.holders[0].file,
        tensor.name,
    )


def _told(holder: Holder) -> str:
    return holder.file if holder.rank is None else f"rank {holder.rank}, {holder.file}"
