"""Errors and notes on stderr, JSON on stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console

from ckptool.commands.document import document
from ckptool.errors import UNCODED, CkptoolError, Damaged
from ckptool.render.text import console, escaped, say

_ROWS = 2048
"""Rows of a list that are printed at a time: half a megabyte of tensors."""


def show_error(error: CkptoolError) -> None:
    """Show the problem in red, then the hint."""
    screen = console(stderr=True)
    say(screen, f"[bold red]error:[/] {_lines(error.message)}")
    hint = _hint(error)
    if hint:
        say(screen, f"[bold cyan]hint:[/] {_lines(hint)}")


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
    more = {"message": error.message, "hint": _hint(error), "exit_code": error.exit_code}
    return document("error", **more, problems=problems)


def _hint(error: CkptoolError) -> str | None:
    """Return the next step: for damage without a hint of its own, verify's hint for its code."""
    if error.hint is not None or not isinstance(error, Damaged):
        return error.hint
    from ckptool.commands.verify.codes import next_step

    return next_step(error)


def show_notes(notes: Iterable[str]) -> None:
    """Show each note on its own line."""
    screen = console(stderr=True)
    for note in notes:
        say(screen, f"[yellow]note:[/] {_lines(note)}")


def show_obstacle(reason: str | None) -> None:
    """Show why a planned run would be refused, if it would be."""
    if reason is not None:
        show_notes([f"would fail now: {reason}"])


def show_interrupted(left: Iterable[str]) -> None:
    """Show that a command was interrupted, and what it left behind."""
    rest = "".join(f": {escaped(note)}" for note in left)
    say(console(stderr=True), f"[yellow]interrupted[/]{rest}")


def show_step(text: str, screen: Console | None = None) -> None:
    """Show the current step of a long command, on a ``screen`` with a bar if there is one."""
    say(screen or console(stderr=True), f"[dim]{escaped(text)}[/]")


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout, the rows of a long list in pieces."""
    for piece in _json_pieces(content):
        sys.stdout.write(piece)
    sys.stdout.write("\n")
    sys.stdout.flush()


def print_json_line(content: Mapping[str, Any]) -> None:
    """Print one of several JSON objects on stdout, as one line."""
    sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
    sys.stdout.flush()


def _json_pieces(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of an object, which would take the memory of all rows again if held whole."""
    before = "{"
    for key, value in content.items():
        yield before
        if isinstance(value, list) and len(value) > _ROWS:
            yield from _list_pieces(key, value)
        else:
            yield _indent({key: value})[1:-2]
        before = ","
    yield "\n}" if content else "{}"


def _list_pieces(key: str, rows: Sequence[Any]) -> Iterator[str]:
    """Yield the text of a member of an object: its key, and a list of many rows."""
    head, end = f"{{\n  {json.dumps(key)}: [", "\n  ]\n}"
    before = head[1:]
    for start in range(0, len(rows), _ROWS):
        yield before + _indent({key: rows[start : start + _ROWS]})[len(head) : -len(end)]
        before = ","
    yield end[:-2]


def _indent(content: Mapping[str, Any]) -> str:
    """Return what indent=2 makes of an object, which Python's own encoder writes slowly."""
    try:
        return msgspec.json.format(json.dumps(content, allow_nan=False), indent=2)
    except msgspec.DecodeError:  # an escape that represents half a character
        return json.dumps(content, indent=2, allow_nan=False)


def _lines(text: str) -> str:
    """Escape untrusted text, and keep only breaks before the indented lines of a list."""
    return "\n".join(escaped(line) for line in re.split(r"\n(?=  )", text))
