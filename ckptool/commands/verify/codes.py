"""The codes of verify's findings, as ``codes.txt`` lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ckptool.core.text import did_you_mean
from ckptool.errors import UNCODED, CkptoolError, Damaged, UsageError


class Severity(Enum):
    """``error`` fails, ``warning`` fails with --strict, ``info`` only informs."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def place(self) -> int:
        """The place among all severities, the most severe first."""
        return list(Severity).index(self)


class Code(NamedTuple):
    """A code's severity, its meaning, the next step, and the check that reports it.

    ``joined_by`` is what problems have in common that are one finding: a ``file``, all but the name
    if they are ``alike``, or the ``cause``.
    """

    severity: Severity
    meaning: str
    hint: str | None
    check: str
    joined_by: frozenset[str]


_STEPS = {
    "AGAIN": "use another copy of the file, or the previous checkpoint",
    "MIXED": "the save was interrupted, or files were lost or mixed with another save's: use"
    " another copy, or the previous checkpoint",
}


def _codes() -> Iterator[tuple[str, Code]]:
    lines = Path(__file__).with_name("codes.txt").read_text("utf-8").splitlines()
    check = ""
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("["):
            check = line.strip("[]")
        elif line and not line.startswith(("#", " ")):
            name, severity, joined_by, meaning = line.split(None, 3)
            hint = _STEPS.get(below.strip(), below.strip()) if below.startswith(" ") else None
            joins = frozenset(joined_by.split("+"))
            yield name, Code(Severity(severity), meaning, hint, check, joins)


CODES = dict(_codes())
ALWAYS = ("files", "save", "structure", "tensors", "pickles", "limits")
"""The checks that are always made."""


def is_error(code: str) -> bool:
    """Return whether a finding with a code fails."""
    return CODES[code].severity is Severity.ERROR


def next_step(error: CkptoolError) -> str | None:
    """Return the hint of an error: for damage without one of its own, that of its code."""
    if error.hint is not None or not isinstance(error, Damaged):
        return error.hint
    codes = {error.message.code, *(problem.code for problem in error.problems)} - {UNCODED}
    return CODES[codes.pop()].hint if len(codes) == 1 and codes <= CODES.keys() else None


def require_codes(codes: Iterable[str]) -> None:
    """Raise UsageError if one of the names is not a code."""
    for code in codes:
        if code not in CODES:
            hint = did_you_mean(code, CODES, "list them: ckptool verify --codes")
            raise UsageError(f"--ignore {code}: no such code", hint=hint)
