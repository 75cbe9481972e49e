"""A progress bar on stderr, where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told of bytes as they are written."""
    if quiet or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from ckptool.render.text import console

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
