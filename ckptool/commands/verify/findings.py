"""What verify found: one finding for each cause, with all that the cause affects.

A file that is cut shows in each of its tensors, when the metadata is read and when the data is.
All of this is one finding of the file, and what else shows it is listed under ``affected``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptool.commands.verify.codes import CODES, Severity
from ckptool.core.catalog import Catalog, places
from ckptool.errors import Problem

_NOT_THERE = ("file-empty", "file-missing", "file-truncated")
"""The codes of a file that lacks bytes, the one that tells most first."""
_FOLLOWS = (*_NOT_THERE, "data-missing", "bytes-unused")
"""What may follow from such a file, of the same file."""
_ONCE_A_FILE = ("copy-damaged", "rank-copied")
_JOINED = (*_NOT_THERE, "file-unreadable", "crc-mismatch", "item-mismatch", "codec-corrupt")
"""The codes of which a file has one finding, however many of its parts show it."""
_LOSSES = frozenset([*_NOT_THERE, "file-unreadable", "metadata-unreadable", "zip-structure"])
"""What can be the reason that nothing of a file could be placed."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Affected:
    """A tensor or value that a finding affects, and how; or only what else shows the cause."""

    tensor: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

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


def finding_of(problem: Problem, affected: tuple[Affected, ...] = ()) -> Finding:
    """Return a problem with the severity and the next step of its code."""
    code = CODES[problem.code]
    return Finding(
        problem.code, code.severity, str(problem), problem.file, problem.tensor, affected, code.hint
    )


@dataclass(frozen=True, slots=True)
class Findings:
    """How the problems of a checkpoint become findings.

    ``sizes`` are the files that are there, in bytes; ``ignore`` are codes to leave out, ``finite``
    makes NaN and infinity errors.
    """

    catalog: Catalog | None
    sizes: Mapping[str, int]
    ignore: Collection[str] = ()
    finite: bool = False

    def of(
        self, problems: Iterable[Problem], pickle_problems: Collection[Problem] = ()
    ) -> tuple[Finding, ...]:
        """Return one finding for each cause, the gravest first, causes before their effects.

        ``pickle_problems`` say best where a pickle names what it should not.
        """
        unique: dict[tuple[object, ...], Problem] = {}
        for problem in problems:
            if problem.code not in self.ignore and not _repeats(problem, pickle_problems):
                unique.setdefault(_identity(problem), problem)
        causes = _by_cause(list(unique.values()), self.catalog)
        findings = [self._finding(group) for group in causes]
        order = list(Severity)
        return tuple(
            sorted(findings, key=lambda found: (order.index(found.severity), bool(found.tensor)))
        )

    def _finding(self, group: Sequence[Problem]) -> Finding:
        cause = group[0]
        if cause.code in _NOT_THERE and cause.file:
            finding = self._of_file(cause.file, group)
        elif len(group) > 1:
            finding = self._of_parts(group)
        else:
            finding = finding_of(cause)
        if cause.code == "not-finite" and self.finite:
            return replace(finding, severity=Severity.ERROR)
        return finding

    def _of_parts(self, group: Sequence[Problem]) -> Finding:
        """Return the finding of a file of which several parts, or its tensors, show the cause."""
        cause = group[0]
        affected = [Affected(p.tensor, str(p)) for p in group if p.tensor or p is not cause]
        names = dict.fromkeys(found.tensor for found in affected if found.tensor)
        alike = sum(problem.code == cause.code for problem in group) - 1
        message = f"{cause}; and {alike:,} more" if alike else str(cause)
        found = finding_of(cause, tuple(affected))
        return replace(found, message=f"{message}{self._named(names)}")

    def _of_file(self, file: str, group: Sequence[Problem]) -> Finding:
        """Return the finding of a file that is missing, empty or cut, with all that it affects."""
        cause = group[0]
        affected = list(dict.fromkeys(Affected(p.tensor, str(p)) for p in group if p.tensor))
        names = dict.fromkeys(one.tensor for one in affected if one.tensor)
        if cause.code != "file-truncated":
            for name in self._stored_in(file):
                if name not in names:
                    affected.append(Affected(name, f"{name}: stored in {file}"))
                    names[name] = None
        affected += dict.fromkeys(Affected(None, str(p)) for p in group[1:] if not p.tensor)
        message = str(cause)
        end = max((problem.end or 0 for problem in group), default=0)
        if cause.code == "file-truncated" and end and file in self.sizes:
            message = f"{file}: {self.sizes[file]:,} bytes, at least {end:,} expected"
        found = finding_of(cause, tuple(affected))
        return replace(found, message=f"{message}{self._named(names)}", tensor=None)

    def _stored_in(self, file: str) -> list[str]:
        tensors = self.catalog.tensors.values() if self.catalog else ()
        return [entry.name for entry in tensors if any(at.file == file for at in places(entry))]

    def _named(self, names: Mapping[str, None]) -> str:
        """Return such as ``; 116 tensors affected: a, b, c and 113 more``."""
        if not names:
            return ""
        known = self.catalog.tensors if self.catalog else {}
        tensors = sum(name in known for name in names)
        counts = ((tensors, "tensor"), (len(names) - tensors, "value"))
        counted = " and ".join(f"{n:,} {noun}{'s' * (n != 1)}" for n, noun in counts if n)
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        return f"; {counted} affected: {', '.join(list(names)[:_MOST_NAMED])}{more}"


def _identity(problem: Problem) -> tuple[object, ...]:
    """What two problems share that are one: what is wrong with a whole file, however it shows."""
    of_a_file = problem.code in _ONCE_A_FILE and problem.file
    return (problem.code, problem.file, "" if of_a_file else str(problem))


def _repeats(problem: Problem, pickle_problems: Collection[Problem]) -> bool:
    """Whether the check of the pickles themselves says better where in the file it is."""
    if problem.code != "hostile-global" or problem in pickle_problems:
        return False
    return any(
        other.code == problem.code and problem.file in (None, other.file)
        for other in pickle_problems
    )


def _by_cause(problems: list[Problem], catalog: Catalog | None) -> list[list[Problem]]:
    """Split problems into those of one cause each, which comes first among them."""
    lacking: dict[str, str] = {}
    for code in reversed(_NOT_THERE):
        lacking |= {p.file: code for p in problems if p.code == code and p.file}
    unread = _unread_file(problems, catalog)
    groups: dict[object, list[Problem]] = defaultdict(list)
    for number, problem in enumerate(problems):
        file = problem.file
        if problem.code == "chunk-gap" and unread is not None:
            groups[unread].append(problem)
        elif file in lacking and problem.code in _FOLLOWS:
            groups[lacking[file], file].append(problem)
        elif file and problem.code in _JOINED:
            groups[problem.code, file].append(problem)
        else:
            groups[number if (problem.code, file) != unread else unread].append(problem)
    return [_cause_first(key, group) for key, group in groups.items()]


def _unread_file(problems: list[Problem], catalog: Catalog | None) -> tuple[str, str] | None:
    """The code and name of the only file of which nothing could be placed: it explains all gaps.

    Which parts of tensors such a file had, nothing else says.
    """
    if catalog is None or not any(problem.code == "chunk-gap" for problem in problems):
        return None
    placed = {at.file for entry in catalog.tensors.values() for at in places(entry)}
    lost = {
        problem.file: problem.code
        for problem in reversed(problems)
        if problem.file and CODES[problem.code].severity is Severity.ERROR
        if problem.file not in placed and problem.code in _LOSSES
        if problem.code == "file-missing" or problem.file in catalog.files
    }
    if len(lost) != 1:
        return None
    ((file, code),) = lost.items()
    return code, file


def _cause_first(key: object, group: list[Problem]) -> list[Problem]:
    """Put what is said of the whole file first, then what is said of its tensors."""
    code = key[0] if isinstance(key, tuple) else group[0].code
    return sorted(group, key=lambda problem: (problem.code != code, bool(problem.tensor)))
