"""Errors, notes and progress on stderr, JSON on stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptool.commands.document import document
from ckptool.errors import UNCODED, CkptoolError, Damaged
from ckptool.render.text import console, escaped, say, size


def show_error(error: CkptoolError) -> None:
    """Show the problem in red, then the hint."""
    screen = console(stderr=True)
    say(screen, f"[bold red]error:[/] {_lines(error.message)}")
    if error.hint:
        say(screen, f"[bold cyan]hint:[/] {_lines(error.hint)}")


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
    """Show each note on a line of its own."""
    screen = console(stderr=True)
    for note in notes:
        say(screen, f"[yellow]note:[/] {_lines(note)}")


def show_obstacle(reason: str | None) -> None:
    """Show why a run that was only planned would be refused, if it would."""
    if reason is not None:
        show_notes([f"would fail now: {reason}"])


def show_interrupted(left: Iterable[str]) -> None:
    """Show that a command was interrupted, and what it left behind."""
    rest = "".join(f": {escaped(note)}" for note in left)
    say(console(stderr=True), f"[yellow]interrupted[/]{rest}")


def show_step(text: str) -> None:
    """Show what a long command does now."""
    say(console(stderr=True), f"[dim]{escaped(text)}[/]")


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    json.dump(content, sys.stdout, indent=2, ensure_ascii=True, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _lines(text: str) -> str:
    """Escape untrusted text, and keep only breaks before the indented lines of a list."""
    return "\n".join(escaped(line) for line in re.split(r"\n(?=  )", text))


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes that were written since the last call."""
    with started_progress(quiet=quiet) as start:
        yield start(total)


@contextmanager
def started_progress(*, quiet: bool) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Yield a function to call with the bytes there will be, once that is known.

    It returns one to call with the bytes that were moved since the last call.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda total: lambda nbytes: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        """In units of 1024, as all sizes are; rich's own counts by the thousand."""

        def render(self, task: Task) -> Text:
            """Return the speed of a task."""
            return Text("" if task.speed is None else f"{size(int(task.speed))}/s")

    columns = (BarColumn(), DownloadColumn(binary_units=True), Speed())
    with Progress(
        *columns, TimeRemainingColumn(), console=console(stderr=True), transient=True
    ) as bar:

        def start(total: int) -> Callable[[int], None]:
            task = bar.add_task("", total=total)
            return lambda nbytes: bar.advance(task, nbytes)

        yield start
