"""From all problems that were noted to the findings of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ckptool.commands.verify.codes import finding_of
from ckptool.commands.verify.findings import Finding, Severity
from ckptool.errors import Problem


def findings_of(
    problems: Iterable[Problem],
    pickle_problems: Collection[Problem],
    *,
    ignore: Collection[str],
    finite: bool,
) -> tuple[Finding, ...]:
    """Each problem once, the gravest first, and causes before what they lead to.

    ``pickle_problems`` say best where a pickle names what it should not; ``ignore`` are codes to
    leave out, ``finite`` makes NaN and infinity errors.
    """
    unique: dict[tuple[object, ...], Problem] = {}
    for problem in problems:
        unique.setdefault(_identity(problem), problem)
    found = [
        _finding(problem, finite=finite)
        for problem in unique.values()
        if problem.code not in ignore and not _is_said_better(problem, pickle_problems)
    ]
    order = list(Severity)
    # A file that is cut shows in each of its tensors.
    return tuple(sorted(found, key=lambda one: (order.index(one.severity), bool(one.tensor))))


def _identity(problem: Problem) -> tuple[object, ...]:
    """What two problems share that are one: what is wrong with a whole file, however it shows."""
    of_a_file = problem.code in ("file-missing", "copy-damaged", "rank-copied") and problem.file
    return (problem.code, problem.file, "" if of_a_file else str(problem))


def _is_said_better(problem: Problem, pickle_problems: Collection[Problem]) -> bool:
    """Whether the look at the pickles themselves says where in the file it is."""
    if problem.code != "hostile-global" or problem in pickle_problems:
        return False
    return any(
        one.code == problem.code and problem.file in (None, one.file) for one in pickle_problems
    )


def _finding(problem: Problem, *, finite: bool) -> Finding:
    finding = finding_of(problem)
    if problem.code == "not-finite" and finite:
        return replace(finding, severity=Severity.ERROR)
    return finding
