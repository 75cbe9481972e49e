"""A progress bar on stderr, where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told of bytes as they are written."""
    with started_progress(quiet=quiet) as started:
        yield started(total)


@contextmanager
def started_progress(*, quiet: bool) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Yields a function that is told how many bytes there will be, once that is known.

    It returns one that is told of bytes as they are moved.
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

    from ckptool.render.text import console, size

    class Speed(ProgressColumn):
        """In units of 1024, as all sizes are; rich's own counts by the thousand."""

        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{size(int(task.speed))}/s")

    columns = (BarColumn(), DownloadColumn(binary_units=True), Speed())
    with Progress(
        *columns, TimeRemainingColumn(), console=console(stderr=True), transient=True
    ) as bar:

        def started(total: int) -> Callable[[int], None]:
            task = bar.add_task("", total=total)
            return lambda nbytes: bar.advance(task, nbytes)

        yield started
