"""What the benchmark does now, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptool.render.messages import show_step

Hear = Callable[[Mapping[str, Any]], None]

_DOING = {
    "limits": "what the hardware can do",
    "training": "training",
    "save": "saving",
    "checking": "changing parameters during a save, and loading it back",
    "aborting": "killing it in mid-save",
}


@contextmanager
def bench_progress(names: int, saves: int, *, quiet: bool) -> Iterator[Hear]:
    """Yields what hears the events of a run: a live bar where a person watches, else lines."""
    if quiet:
        yield lambda event: None
        return
    if not sys.stderr.isatty():
        yield _say
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from ckptool.render.text import console

    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(24), TimeElapsedColumn())
    words = TextColumn("{task.description}", markup=False)
    with Progress(*columns, words, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the ranks", total=names)

        def hear(event: Mapping[str, Any]) -> None:
            kind = event["event"]
            if kind in ("measured", "left-out", "failed"):
                bar.advance(task)
            elif kind in ("begin", "doing"):
                bar.update(task, description=_words(event, saves))

        yield hear


def _words(event: Mapping[str, Any], saves: int) -> str:
    what = _DOING.get(event.get("what", ""), "")
    if event.get("what") == "save":
        what += f" {event['number'] + 1} of {saves}"
    return f"{event['name']}  {what}".rstrip()


def _say(event: Mapping[str, Any]) -> None:
    if event["event"] == "begin":
        show_step(f"measuring {event['name']}")
