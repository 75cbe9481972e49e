"""Progress of a command: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from ckptool.core.text import duration, duration_range
from ckptool.render.messages import show_step
from ckptool.render.text import console, say, size

if TYPE_CHECKING:
    from ckptool.commands.transfer.estimate import Estimate

NO_PROGRESS = "CKPTOOL_NO_PROGRESS"
"""The environment variable that ``--no-progress`` sets."""
INTERVAL = 10.0
"""Seconds between two lines, at least; and before the first one."""

Advance = Callable[[int], None]


def is_live(*, quiet: bool) -> bool | None:
    """Return whether progress is a live bar, or else lines of a log; None if it is not shown."""
    if quiet or os.environ.get(NO_PROGRESS):
        return None
    return sys.stderr.isatty()


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Advance]:
    """Yield a function to call with the bytes written since the last call."""
    with started_progress(quiet=quiet) as start:
        yield start(total)


@contextmanager
def started_progress(*, quiet: bool) -> Iterator[Callable[[int], Advance]]:
    """Yield a function to call with the total bytes, once known.

    It returns one to call with the bytes moved since the last call.
    """
    live = is_live(quiet=quiet)
    if live is None:
        yield lambda total: lambda nbytes: None
    elif live:
        with _bar() as start:
            yield start
    else:
        yield lambda total: LogProgress(total, console(stderr=True)).advance


@contextmanager
def _bar() -> Iterator[Callable[[int], Advance]]:
    """Yield a function that starts a bar, which appears with the first bytes, after notes."""
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
        """Speed in units of 1024, as all sizes are; rich's own counts by the thousand."""

        def render(self, task: Task) -> Text:
            """Return the speed of a task."""
            return Text("" if task.speed is None else f"{size(int(task.speed))}/s")

    columns = (BarColumn(), DownloadColumn(binary_units=True), Speed(), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), transient=True)

    def start(total: int) -> Advance:
        task = bar.add_task("", total=total)

        def advance(nbytes: int) -> None:
            if not bar.live.is_started:
                bar.start()
            bar.advance(task, nbytes)

        return advance

    try:
        yield start
    finally:
        bar.stop()


def show_estimate(estimate: Estimate | None) -> None:
    """Show how long a transfer will take, and why; nothing if that is not known."""
    if estimate is not None and estimate.most >= INTERVAL:
        took = duration_range(estimate.least, estimate.most)
        rate = f"at {size(int(estimate.rate))}/s, as the source is read now"
        show_step(f"about {took}: {size(estimate.moved)} to read and write, {rate}")


class LogProgress:
    """Prints a line with rate and time left, at most one in ten seconds; threads may share it."""

    def __init__(self, total: int, screen: Console) -> None:
        self._total = total
        self._screen = screen
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._printed = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count bytes, and print a line if the last one is long ago."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._printed < INTERVAL:
                return
            self._printed = now
            rate = self._done / (now - self._began)
        share = self._done / self._total if self._total else 1.0
        left = max(0, self._total - self._done) / rate if rate else 0.0
        line = f"{share:.0%} of {size(self._total)}, {size(int(rate))}/s, {duration(left)} left"
        say(self._screen, f"[dim]{line}[/]")
