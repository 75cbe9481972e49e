"""The findings of verify: a report with one finding per cause, and everything it affects.

A truncated file shows in each of its tensors, in the metadata and in the data. All of this is one
finding of the file, with the rest listed under ``affected``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.document import Report
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.codes import CODES, Severity, is_error
from ckptool.core.catalog import Catalog, places
from ckptool.core.text import list_some, plural
from ckptool.errors import Problem
from ckptool.storage.url import Location

_ABSENT = ("file-empty", "file-missing", "file-truncated")
"""The codes of a file that lacks bytes, the most specific first."""
_FOLLOWS = (*_ABSENT, "data-missing", "bytes-unused")
"""Codes that may follow from such a file, for the same file."""
_ONCE_A_FILE = ("copy-damaged", "rank-copied")
_DAMAGED = ("file-unreadable", "crc-mismatch", "item-mismatch", "codec-corrupt")
DAMAGE = (*_ABSENT, *_DAMAGED)
"""The codes of data that is damaged or absent."""
_LOSSES = frozenset([*_ABSENT, "file-unreadable", "metadata-unreadable", "zip-structure"])
"""Possible reasons why nothing of a file could be placed."""
_SEVERAL = ("file-missing", "rank-missing")
"""The codes that may be of several missing files at once, none of which is the problem's."""
_RANKS = "rank-missing", None
"""The code and file of the problem that ranks are missing: all that lacks their data follows."""
_MOST_NAMED = 3
NOTHING_COMPARED = "nothing-compared"
SIDES = ("A", "B")
"""The names of the two sides of a comparison in findings and reports."""


class Affected(Struct, frozen=True):
    """A tensor or value that a finding affects, and how; or another symptom of the cause.

    ``counts`` says how many of what were found in it, by name.
    """

    tensor: str | None
    message: str
    counts: Mapping[str, int] | None = None

    @classmethod
    def by(cls, problem: Problem) -> Affected:
        """Return what a problem affects, and how."""
        return cls(problem.tensor, str(problem), problem.counts)


class Finding(Struct, frozen=True):
    """One problem, or one remark.

    ``code`` is stable, in kebab-case; ``file`` is relative to the checkpoint's root; ``message``
    says the thing, the problem and the numbers, ``hint`` the next step.
    """

    code: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    affected: tuple[Affected, ...] = ()
    hint: str | None = None

    @property
    def names(self) -> set[str]:
        """The tensors and values that it is about, or that it affects."""
        names = {self.tensor, *(affected.tensor for affected in self.affected)}
        return {name for name in names if name is not None}

    def within(self, head: str) -> Finding:
        """Return the finding, prefixed with what it is part of."""
        affected = tuple(replace(a, message=f"{head}: {a.message}") for a in self.affected)
        return replace(self, message=f"{head}: {self.message}", affected=affected)

    def first_line(self, head: str) -> str:
        """Return the first line of its message, without a ``head`` that the reader knows."""
        return self.message.partition("\n")[0].removeprefix(head)

    @property
    def count(self) -> int:
        """Return how many tensors and values it affects, at least 1."""
        return max(1, len({affected.tensor for affected in self.affected if affected.tensor}))


def finding_of(problem: Problem, affected: tuple[Affected, ...] = ()) -> Finding:
    """Return the finding of a problem, with its code's severity, and its own or the code's hint."""
    code, hint = CODES[problem.code], problem.hint or CODES[problem.code].hint
    return Finding(
        problem.code, code.severity, str(problem), problem.file, problem.tensor, affected, hint
    )


class VerifyReport(Report, frozen=True):
    """The findings at ``path``; true if there are no errors.

    ``depth`` is how much was read (``full``, ``quick``, ``sample``, ``part``), ``nbytes`` the bytes
    of data read. ``ignored`` are errors that the options exclude from the findings. ``summary`` is
    one line; ``ok`` decides the exit code.
    """

    path: Location
    format: str | None
    findings: tuple[Finding, ...]
    ok: bool = True
    summary: str = ""
    depth: str = "full"
    nbytes: int = field(default=0, name="bytes_read")
    files: int = field(default=0, name="totals.files")
    tensors: int = field(default=0, name="totals.tensors")
    ignored: tuple[Finding, ...] = field(default=(), name="_ignored")

    schema: ClassVar = "verify"

    def of(self, severity: Severity) -> list[Finding]:
        """Return the findings of one severity."""
        return [finding for finding in self.findings if finding.severity is severity]

    def fails(self, strict: bool) -> list[Finding]:
        """Return the findings that make the checkpoint fail."""
        return self.of(Severity.ERROR) + (self.of(Severity.WARNING) if strict else [])

    @property
    def lost(self) -> set[str]:
        """The names of tensors and values whose data is damaged or absent."""
        damage = (f for f in self.of(Severity.ERROR) if f.code in DAMAGE)
        return {name for finding in damage for name in finding.names}

    def count_failures(self, strict: bool) -> int:
        """Return how many tensors, values and other things are wrong."""
        counts = [(finding.code, finding.count) for finding in self.fails(strict)]
        follows = len(counts) > 1  # that nothing was compared, from the others
        return sum(count for code, count in counts if code != NOTHING_COMPARED or not follows)

    @property
    def ignored_text(self) -> str:
        """Return text such as ``; 1 error ignored: file-truncated (__0_0.distcp)``, or nothing."""
        if not self.ignored:
            return ""
        by_code: dict[str, list[str]] = defaultdict(list)
        for finding in self.ignored:
            by_code[finding.code] += filter(None, [finding.file or finding.tensor])
        parts = [
            f"{code} ({list_some(names, _MOST_NAMED)})" if names else code
            for code, names in by_code.items()
        ]
        return f"; {plural(len(self.ignored), 'error')} ignored: {', '.join(parts)}"


_READ = {"full": "all data read and checked", "quick": "metadata checked, data not read"}


_LIMITS = {
    "checkpoint-nested": "checkpoints inside it are not read",
    "no-checksum": "changed values cannot be detected in files without checksums",
}
"""What is not proved where something was found."""


def summarize(report: VerifyReport, options: VerifyOptions) -> str:
    """Return one line on a verification with these options."""
    sampled = f"a sample of {options.sample:.3g} of the data read and checked (seed {options.seed})"
    read = _READ.get(report.depth, sampled)
    if options.part is not None:
        read = (
            f"part {options.part.position + 1} of {options.part.size} of the data read and checked"
        )
    ignored = report.ignored_text
    counts = [
        plural(len(report.of(severity)), severity.value)
        for severity in (Severity.ERROR, Severity.WARNING)
        if report.of(severity)
    ]
    if not report.ok:
        rest = "" if report.depth == "full" else f"; {read}"
        return f"FAILED: {', '.join(counts)}{rest}{ignored}"
    if ignored and report.depth == "full":
        read = "not all data read and checked"
    codes = {finding.code for finding in report.findings}
    limits = "".join(f"; {limit}" for code, limit in _LIMITS.items() if code in codes)
    return f"OK: {', '.join([read, *counts])}{ignored}{limits}"


_NEVER_IGNORED = {NOTHING_COMPARED}
"""Codes that leave no answer, so that they cannot be ignored."""


class Findings(Struct, frozen=True):
    """Turns the problems of a checkpoint into findings.

    ``sizes`` are those of the existing files, in bytes; ``ignore`` are codes to exclude,
    ``fail_nonfinite`` makes NaN and infinity errors.
    """

    catalog: Catalog | None
    sizes: Mapping[str, int]
    ignore: Collection[str] = ()
    fail_nonfinite: bool = False

    def of(
        self, problems: Iterable[Problem], pickle_problems: Collection[Problem] = ()
    ) -> tuple[list[Finding], list[Finding]]:
        """Return one finding per cause, and the ignored errors among them.

        The most severe come first, causes before effects. ``pickle_problems`` locate forbidden
        names in a pickle best.
        """
        unique: dict[tuple[object, ...], Problem] = {}
        for problem in problems:
            if not _repeats(problem, pickle_problems):
                of_a_file = problem.code in _ONCE_A_FILE and problem.file
                words = "" if of_a_file else str(problem)
                unique.setdefault((problem.code, problem.file, words), problem)
        ignore = set(self.ignore) - _NEVER_IGNORED
        shown = [problem for problem in unique.values() if problem.code not in ignore]
        rest = [problem for problem in unique.values() if problem.code in ignore]
        # The copy of a file that a warning names was not read either.
        ignored = [
            finding
            for finding in self._join(rest)
            if finding.severity is Severity.ERROR or finding.code == "copy-damaged"
        ]
        return self._join(shown), ignored

    def _join(self, problems: list[Problem]) -> list[Finding]:
        if not problems:
            return []
        findings = [self._finding(group) for group in _by_cause(problems, self.catalog)]
        return sorted(findings, key=lambda finding: (finding.severity.place, bool(finding.tensor)))

    def _finding(self, group: Sequence[Problem]) -> Finding:
        cause = group[0]
        if cause.code in _ABSENT and cause.file:
            finding = self._finding_of_file(cause.file, group)
        elif len(group) > 1 and all(p.tensor and _detail(p) == _detail(cause) for p in group):
            finding = _finding_of_names(group)
        elif len(group) > 1:
            finding = self._finding_of_parts(group)
        else:
            finding = finding_of(cause, () if cause.counts is None else (Affected.by(cause),))
        if cause.code == "not-finite" and self.fail_nonfinite:
            return replace(finding, severity=Severity.ERROR, hint=None)
        return finding

    def _finding_of_parts(self, group: Sequence[Problem]) -> Finding:
        """Return the finding of a file of which several parts, or its tensors, show the cause."""
        cause = group[0]
        affected = [Affected.by(p) for p in group if p.tensor or p is not cause]
        names = dict.fromkeys(part.tensor for part in affected if part.tensor)
        count = sum(p.code == cause.code and _detail(p) != _detail(cause) for p in group)
        more = f"; and {count:,} more" if count and count >= len(names) else ""
        tensor = cause.tensor if len(names) == 1 else None
        message = f"{cause}{more}{self._affected_text(names)}"
        return replace(finding_of(cause, tuple(affected)), message=message, tensor=tensor)

    def _finding_of_file(self, file: str, group: Sequence[Problem]) -> Finding:
        """Return the finding of a missing, empty or truncated file, with everything it affects."""
        cause = group[0]
        affected = list(dict.fromkeys(Affected.by(p) for p in group if p.tensor))
        names = dict.fromkeys(part.tensor for part in affected if part.tensor)
        tensors = self.catalog.tensors if self.catalog and cause.code != "file-truncated" else {}
        for name, entry in tensors.items():
            if name not in names and any(at.file == file for at in places(entry)):
                affected.append(Affected(name, f"{name}: stored in {file}"))
                names[name] = None
        affected += dict.fromkeys(Affected.by(p) for p in group[1:] if not p.tensor)
        message = str(cause)
        end = max((problem.end or 0 for problem in group), default=0)
        if cause.code == "file-truncated" and end and file in self.sizes:
            message = f"{file}: {self.sizes[file]:,} bytes, at least {end:,} expected"
        finding = finding_of(cause, tuple(affected))
        return replace(finding, message=f"{message}{self._affected_text(names)}", tensor=None)

    def _affected_text(self, names: Mapping[str, None]) -> str:
        """Return text such as ``; 116 tensors affected: a, b, c and 113 more``."""
        if not names:
            return ""
        counts = [(len(names), "name")]
        if self.catalog is not None:
            tensors = sum(name in self.catalog.tensors for name in names)
            counts = [(tensors, "tensor"), (len(names) - tensors, "value")]
        nouns = " and ".join(plural(count, noun) for count, noun in counts if count)
        return f"; {nouns} affected: {list_some(list(names), _MOST_NAMED)}"


def _finding_of_names(group: Sequence[Problem]) -> Finding:
    """Return the finding of several names with the same problem."""
    finding = finding_of(group[0], tuple(map(Affected.by, group)))
    message = (
        f"{list_some([str(problem.tensor) for problem in group], _MOST_NAMED)}: {_detail(group[0])}"
    )
    return replace(finding, message=message, tensor=None)


def _detail(problem: Problem) -> str:
    """Return the problem without the name of the tensor or value."""
    return problem.removeprefix(f"{problem.tensor}: ")


def _repeats(problem: Problem, pickle_problems: Collection[Problem]) -> bool:
    """Return whether the check of the pickles reports the same with a better location."""
    if problem.code != "hostile-global" or problem in pickle_problems:
        return False
    return any(
        other.code == problem.code and problem.file in (None, other.file)
        for other in pickle_problems
    )


def _by_cause(problems: list[Problem], catalog: Catalog | None) -> list[list[Problem]]:
    """Group problems by cause; the cause comes first in each group."""
    lacking: dict[str, str] = {}
    for code in reversed(_ABSENT):
        lacking |= {p.file: code for p in problems if p.code == code and p.file}
    unread = _cause_of_gaps(problems, catalog)
    covered = _files_of_one_cause(problems)
    of_files = {(p.code, p.file, str(p)) for p in problems if p.file and not p.tensor}
    groups: dict[object, list[Problem]] = defaultdict(list)
    for number, problem in enumerate(problems):
        file, joined_by = problem.file, CODES[problem.code].joined_by
        is_of_file = (problem.code, file, _detail(problem)) in of_files
        if problem.code == "chunk-gap" and unread is not None:
            groups[unread].append(problem)
        elif file in covered and problem.code in _FOLLOWS:
            continue  # one problem says it of several files
        elif file in lacking and problem.code in _FOLLOWS:
            groups[lacking[file], file].append(problem)
        elif file and (is_of_file or "file" in joined_by):
            groups[problem.code, file].append(problem)
        elif "cause" in joined_by:
            groups[problem.code].append(problem)
        elif problem.tensor and "alike" in joined_by:
            groups[problem.code, file, _detail(problem)].append(problem)
        else:
            is_cause = (problem.code, file) in (unread, _RANKS) and not problem.tensor
            groups[(problem.code, file) if is_cause else number].append(problem)
    causes = []
    for key, group in groups.items():
        code = key[0] if isinstance(key, tuple) else group[0].code
        # problems of the whole file come before those of its tensors
        causes.append(sorted(group, key=lambda p: (p.code != code, bool(p.tensor))))
    return causes


def _files_of_one_cause(problems: list[Problem]) -> set[str]:
    """Return the missing files that one problem of several is about.

    A file is none of these if more is said of it than that a read did not find it.
    """
    joined = [problem for problem in problems if problem.code in _SEVERAL]
    if not any(problem.file is None and problem.tensor is None for problem in joined):
        return set()
    missing = [problem for problem in problems if problem.code == "file-missing" and problem.file]
    reported = {p.file for p in missing if not p.endswith(": the file is missing")}
    return {p.file for p in missing if p.file} - reported


def _cause_of_gaps(
    problems: list[Problem], catalog: Catalog | None
) -> tuple[str, str | None] | None:
    """Return the code and file of the one cause of all gaps, if there is one.

    It is that ranks are missing, or saved nothing, or the only file of which nothing could be
    placed: nothing else records which parts of tensors it had.
    """
    if catalog is None or not any(problem.code == "chunk-gap" for problem in problems):
        return None
    if _RANKS in [(problem.code, problem.file) for problem in problems]:
        return _RANKS
    placed = {at.file for entry in catalog.tensors.values() for at in places(entry)}
    losses = {
        problem.file: problem.code
        for problem in reversed(problems)
        if problem.file and is_error(problem.code)
        if problem.file not in placed and problem.code in _LOSSES
        if problem.code == "file-missing" or problem.file in catalog.files
    }
    if len(losses) != 1:
        return None
    ((file, code),) = losses.items()
    return code, file
