"""Every way ckptool can fail, and the exit code of each.

    CkptoolError
    ├── UsageError        2    the command line asks for something that makes no sense
    │   └── NoSuchName         no tensor of the checkpoint is called so
    ├── SourceError       3    the source is missing, unrecognized or malformed
    │   ├── NotFound           nothing is there
    │   ├── Unrecognized       something is there, but no checkpoint ckptool knows
    │   │   ├── Empty          a checkpoint's file with nothing in it
    │   │   └── Several        a folder of more than one checkpoint, such as a run's steps
    │   ├── Damaged            a checkpoint that is not whole or contradicts itself
    │   └── Hostile            a pickle that names a global able to run code
    ├── Unsupported          4    the source is fine, but what is asked cannot be done with it
    ├── TransferError     5    reading or writing failed midway
    │   ├── Changed            the source was changed while it was read
    │   ├── NotVerified        what was written is not what should have been
    │   └── Committed          all was written and stands; what follows that failed
    └── InternalError    70    a fault of ckptool itself

An error says the thing, the problem and the numbers; ``hint`` is the next command or step. What a
disk or a store refuses meanwhile is an OSError: it says nothing of the checkpoint, nothing takes it
for damage, and it ends all work, as a TransferError.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

UNCODED = "damaged"
UNREAD = "tensor-unsupported"
"""The code of a tensor of an unsupported kind: it is sound, but not read."""


class Problem(str):
    """One problem in words, with the facts that a program needs.

    ``code`` is one of those that ``verify`` documents, ``file`` is relative to the source's root.
    ``end`` is the offset in bytes that a truncated file should reach, if known; ``hint`` is the
    next step if the code does not imply it; ``counts`` says how many of what were found, by name.
    """

    code: str
    file: str | None
    tensor: str | None
    end: int | None
    hint: str | None = None
    counts: Mapping[str, int] | None = None

    def __new__(
        cls,
        message: str,
        code: str = UNCODED,
        *,
        file: str | None = None,
        tensor: str | None = None,
        end: int | None = None,
    ) -> Self:
        problem = super().__new__(cls, message)
        problem.code, problem.file, problem.tensor, problem.end = code, file, tensor, end
        return problem

    def within(self, head: str, *, tensor: str | None = None) -> Problem:
        """Return the same problem, prefixed with what it is part of."""
        return self._like(f"{head}: {self}", tensor=tensor or self.tensor)

    def with_hint(self, hint: str) -> Self:
        """Return the same problem with its own next step."""
        return self._like(str(self), hint=hint)

    def with_counts(self, **counts: int) -> Self:
        """Return the same problem with what was counted."""
        return self._like(str(self), counts=counts)

    def recoded(self, code: str) -> Problem:
        """Return the same problem under another code."""
        return self._like(str(self), code=code)

    def of_tensor(self, tensor: str) -> Problem:
        """Return the same problem for a tensor or value of another name."""
        return self._like(str(self), tensor=tensor)

    def in_folder(self, folder: str) -> Self:
        """Return the same problem with its file relative to the folder above."""
        if not self.file:
            return self._like(str(self), file=folder)
        message = f"{folder}/{self}" if self.startswith(f"{self.file}: ") else str(self)
        return self._like(message, file=f"{folder}/{self.file}")

    def _like(self, message: str, **changes: object) -> Self:
        problem = type(self)(message)
        vars(problem).update(vars(self), **changes)
        return problem


class Refusal(Problem):
    """Why one tensor or value cannot or must not be read, while all others can.

    ``may_be_tensor`` is False if it is known to be a value; ``record`` is then its content.
    ``part`` is ``model`` or ``optimizer`` if known, whatever the name says. ``derived`` means that
    it only follows from another refusal of the same checkpoint.
    """

    may_be_tensor = True
    record: object = None
    part: str | None = None
    derived = False

    @property
    def reason(self) -> str:
        """Return the reason, without the name of what is refused."""
        return self.removeprefix(f"{self.tensor}: ")

    def called(self, name: str) -> Self:
        """Return the refusal with another name."""
        return self._like(f"{name}: {self.reason}", tensor=name)

    def derived_for(self, name: str, because: str = "") -> Self:
        """Return the refusal of another entry, maybe a tensor, that depends on this one."""
        changes = {"tensor": name, "derived": True, "may_be_tensor": True}
        return self._like(f"{name}: {because}{self.reason}", **changes)


class CkptoolError(Exception):
    """Base of all errors meant for the user; ``exit_code`` is the exit code of the process.

    ``code``, ``file``, ``tensor``, ``end`` and ``hint`` are those of its ``Problem``; a message
    that is a Problem brings its own. ``problems`` are its parts: one, unless ``damaged`` joined
    several.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        code: str = UNCODED,
        *,
        file: str | None = None,
        tensor: str | None = None,
        end: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        if not isinstance(message, Problem):
            message = Problem(message, code, file=file, tensor=tensor, end=end)
        if hint is not None:  # so that verify, which takes problems apart, shows it, too
            message = message.with_hint(hint)
        self.message: Problem = message
        self.hint = hint = message.hint
        if hint is not None:
            self.add_note(f"hint: {hint}")
        self.problems: tuple[Problem, ...] = (self.message,)

    def add_hint(self, hint: str) -> None:
        """Add one more next step."""
        self.hint = hint if self.hint is None else f"{self.hint}; {hint}"
        is_one = self.problems == (self.message,)
        self.message = self.message.with_hint(self.hint)
        self.problems = (self.message,) if is_one else self.problems
        self.add_note(f"hint: {hint}")

    def within(self, head: str, *, tensor: str | None = None) -> Self:
        """Return the same error, prefixed with what it is part of."""
        return type(self)(self.message.within(head, tensor=tensor), hint=self.hint)

    def in_folder(self, folder: str) -> Self:
        """Return the same error with its files relative to the folder above."""
        error = type(self)(self.message.in_folder(folder), hint=self.hint)
        error.problems = tuple(problem.in_folder(folder) for problem in self.problems)
        return error


class UsageError(CkptoolError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class NoSuchName(UsageError, KeyError):
    """A checkpoint has no tensor of this name. A KeyError, since checkpoints are mappings."""

    __str__ = Exception.__str__  # KeyError's quotes the message


class SourceError(CkptoolError):
    """The source is missing, unrecognized or malformed."""

    exit_code = 3


class NotFound(SourceError):
    """The path does not exist or cannot be read."""


class Unrecognized(SourceError):
    """No known checkpoint format is there."""


class Empty(Unrecognized):
    """The file is what torch.save writes, but has no tensor and no value."""


class Several(Unrecognized):
    """The path contains more than one checkpoint, and none of them was named."""


class Damaged(SourceError):
    """The checkpoint is incomplete, or its parts contradict one another."""


class Hostile(SourceError):
    """A pickle names a global that can run code. Nothing was called."""


class Unsupported(CkptoolError):
    """The source is fine, but what is asked cannot be done with it."""

    exit_code = 4


class Undetermined(Unsupported):
    """The files do not determine the answer: none is known, or more than one fits."""


class TransferError(CkptoolError):
    """Reading or writing failed midway; whatever was at the target before is still there."""

    exit_code = 5


_MAY_NOT = "`ls -ld` shows who may, of it and of its folders; chmod changes that"
_FULL = "free some space, or write to another disk"
_REFUSED = {
    errno.EACCES: _MAY_NOT,
    errno.EPERM: _MAY_NOT,
    errno.EROFS: "the disk is mounted read-only: write elsewhere",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENAMETOOLONG: "shorten it, or that of a folder that it is in",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
}


def refused_hint(error: OSError) -> str | None:
    """Return the next step where a disk refuses, None if it only depends on the case."""
    return _REFUSED.get(error.errno or 0)


def failure_of(error: OSError, head: str = "") -> TransferError:
    """Return the error for an OSError of a disk or store, prefixed with ``head``."""
    where = f"{error.filename}: " if error.filename is not None else ""
    reason = f"{error.strerror or error or type(error).__name__}".removeprefix(head)
    code, hint = getattr(error, "code", UNCODED), getattr(error, "hint", refused_hint(error))
    return TransferError(f"{head or where}{reason}", code, hint=hint)


class NoAnswer(OSError):
    """A store did not answer, however often it was asked; that says nothing about its content.

    Like the error of a failing disk it is not a CkptoolError: code that collects a checkpoint's
    problems lets it pass, so that it ends all work.
    """

    code = "no-answer"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.strerror = message
        self.hint = hint


class Denied(NoAnswer):
    """A store refuses a request."""

    code = "access-denied"


class Changed(TransferError):
    """The source was changed while it was read, so the data read may mix two saves."""


class NotVerified(TransferError):
    """The output differs from what should have been written; it was discarded."""


class Committed(TransferError):
    """The output is complete and in place; only a step after that failed."""


class InternalError(CkptoolError):
    """A bug in ckptool: no input is to blame."""

    exit_code = 70


@contextmanager
def coded(code: str, *, file: str | None = None, tensor: str | None = None) -> Iterator[None]:
    """Give errors raised in this context a code, file and tensor if they have none."""
    try:
        yield
    except CkptoolError as error:
        for problem in error.problems:
            problem.code = code if problem.code == UNCODED else problem.code
            problem.file = file if problem.file is None else problem.file
            problem.tensor = tensor if problem.tensor is None else problem.tensor
        raise


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Name a file in an error raised in this context, if that is of it and does not name it."""
    try:
        yield
    except CkptoolError as error:
        if len(error.problems) > 1 or file in error.message:
            raise
        raise error.within(file) from None


def refused(problems: Sequence[Problem], *, subject: str) -> CkptoolError:
    """Return one error for unreadable entries: Hostile if some of them can run code.

    Unsupported if all are tensors of unsupported kinds.
    """
    hostile = [problem for problem in problems if problem.code == "hostile-global"]
    unsound = [problem for problem in problems if problem.code != UNREAD]
    if not unsound:
        return _unread(problems)
    if not hostile:
        return damaged(unsound, subject=subject)
    hint = "do not load this file with torch.load(weights_only=False) or pickle"
    error = Hostile(hostile[0], hint=hint)
    error.problems = tuple(hostile)
    return error


def _unread(problems: Sequence[Problem]) -> Unsupported:
    """Return one error for all tensors of unsupported kinds."""
    more = f"\n  and {len(problems) - 1:,} more such tensors" if len(problems) > 1 else ""
    hint = "`ckptool convert --drop NAME` converts the rest"
    hint += "; in torch: make them plain tensors before saving"
    error = Unsupported(
        f"{problems[0]}{more}", UNREAD, file=problems[0].file, tensor=problems[0].tensor, hint=hint
    )
    error.problems = tuple(problems)
    return error


def damaged(problems: Sequence[str], *, subject: str, hint: str | None = None) -> Damaged:
    """Return one error for several problems of one kind: the distinct ones, up to twelve."""
    different = list(dict.fromkeys(problems))
    message = different[0]
    if len(different) > 1:
        shown = [f"  - {problem}" for problem in different[:12]]
        if len(different) > len(shown):
            shown.append(f"  - and {len(different) - len(shown):,} more")
        message = f"{len(different):,} problems in {subject}:\n" + "\n".join(shown)
    own_hint = getattr(different[0], "hint", None) if len(different) == 1 else None
    error = Damaged(message, hint=own_hint or hint)
    error.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
    return error


def error_text(error: BaseException) -> str:
    """Return the message of an error, in one line, without credentials in its URLs."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://)[^/\s@'\"]*@", r"\1", text)
    return re.sub(r"\?[^\s'\")]*=[^\s'\")]*", "", text)[:300]
