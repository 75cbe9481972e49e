"""Errors, notes and steps on stderr, and other lines of a few pieces."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckptool.commands.document import document
from ckptool.core.text import visible
from ckptool.errors import UNCODED, CkptoolError, Damaged
from ckptool.render.data import stream_of

if TYPE_CHECKING:
    from rich.console import Console

Line = Sequence[str | tuple[str, str]]
"""The pieces of a line, in order: untrusted text, alone or with its style."""
_FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""The environment variables by which rich takes another stream for a terminal."""
_BREAK = r"\n(?=  )"
"""The breaks of a message that are kept: those before the indented lines of a list."""


def show_error(error: CkptoolError) -> None:
    """Show the problem in red, then the hint."""
    _show("bold red", "error:", f" {error.message}")
    hint = _hint(error)
    if hint:
        _show("bold cyan", "hint:", f" {hint}")


def error_json(error: CkptoolError) -> dict[str, Any]:
    """Return the error as ``ckptool.error/2``: its message, its exit code, all its problems."""
    damaged = isinstance(error, Damaged)
    problems = [
        {
            "message": problem,
            "code": problem.code if damaged or problem.code != UNCODED else None,
            "file": problem.file,
            "tensor": problem.tensor,
        }
        for problem in error.problems
    ]
    fields = {"message": error.message, "hint": _hint(error), "exit_code": error.exit_code}
    return document("error", **fields, problems=problems)


def _hint(error: CkptoolError) -> str | None:
    """Return the next step: for damage without a hint of its own, verify's hint for its code."""
    if error.hint is not None or not isinstance(error, Damaged):
        return error.hint
    from ckptool.commands.verify.codes import next_step

    return next_step(error)


def show_notes(notes: Iterable[str]) -> None:
    """Show each note on its own line."""
    for note in notes:
        _show("yellow", "note:", f" {note}")


def show_obstacle(reason: str | None) -> None:
    """Show why a planned run would be refused, if it would be."""
    if reason is not None:
        show_notes([f"would fail now: {reason}"])


def show_interrupted(left: Iterable[str]) -> None:
    """Show that a command was interrupted, and what it left behind."""
    _show("yellow", "interrupted", "".join(f": {note}" for note in left))


def show_step(text: str, screen: Console | None = None) -> None:
    """Show the current step of a long command, on a ``screen`` with a bar if there is one."""
    _show("dim", text, screen=screen)


def _show(style: str, head: str, rest: str = "", *, screen: Console | None = None) -> None:
    """Show untrusted text on stderr, its head in a style."""
    first, *more = re.split(_BREAK, rest)
    lines: list[Line] = [[(head, style), first], *([line] for line in more)]
    show_lines(lines, stderr=True, screen=screen)


def say(*pieces: str | tuple[str, str], stderr: bool = False) -> None:
    """Print a line; no pieces are an empty one."""
    show_lines([pieces], stderr=stderr)


def show_lines(
    lines: Iterable[Line], *, stderr: bool = False, screen: Console | None = None
) -> None:
    """Print lines, on a ``screen`` if there is one. What draws is imported for a terminal alone."""
    stream = stream_of(stderr=stderr)
    if screen is None and not (stream.isatty() or any(name in os.environ for name in _FORCING)):
        for line in lines:
            stream.write("".join([text for text, _ in _pieces(line)]) + "\n")
        stream.flush()
        return
    from rich.text import Text

    from ckptool.render.text import console, emit

    emit(screen or console(stderr), [Text.assemble(*_pieces(line)) for line in lines])


def _pieces(line: Line) -> list[tuple[str, str]]:
    """Return the pieces of a line as they are shown, each with its style."""
    pairs = ((piece, "") if isinstance(piece, str) else piece for piece in line)
    return [(visible(text), style) for text, style in pairs]
