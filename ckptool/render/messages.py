"""Errors and notes on stderr, JSON on stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.commands.document import document
from ckptool.errors import UNCODED, CkptoolError, Damaged
from ckptool.render.text import console, escaped


def show_error(error: CkptoolError) -> None:
    """The problem in red, then the hint."""
    screen = console(stderr=True)
    screen.print(f"[bold red]error:[/] {_lines(error.message)}", highlight=False, soft_wrap=True)
    if error.hint:
        screen.print(f"[bold cyan]hint:[/] {_lines(error.hint)}", highlight=False, soft_wrap=True)


def error_json(error: CkptoolError) -> dict[str, Any]:
    """Return the error as ``ckptool.error/2``: what it says, its exit code, all its problems."""
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
    more = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    return document("error", **more, problems=problems)


def show_notes(notes: Iterable[str]) -> None:
    """Each note on a line of its own."""
    screen = console(stderr=True)
    for note in notes:
        screen.print(f"[yellow]note:[/] {_lines(note)}", highlight=False, soft_wrap=True)


def show_obstacle(reason: str | None) -> None:
    """Why a run would be refused that has only been planned, if it would."""
    if reason is not None:
        show_notes([f"would fail now: {reason}"])


def show_interrupted(left: Iterable[str]) -> None:
    """That a command was interrupted, and what it left behind."""
    said = "".join(f": {escaped(one)}" for one in left)
    console(stderr=True).print(f"[yellow]interrupted[/]{said}", highlight=False, soft_wrap=True)


def show_step(text: str) -> None:
    """What a long command does now."""
    console(stderr=True).print(f"[dim]{escaped(text)}[/]", highlight=False, soft_wrap=True)


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    json.dump(content, sys.stdout, indent=2, ensure_ascii=True, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _lines(text: str) -> str:
    """Untrusted text on its lines: those of a list are indented; any other break is spelled out."""
    return "\n".join(escaped(line) for line in re.split(r"\n(?=  )", text))
