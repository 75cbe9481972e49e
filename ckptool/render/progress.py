"""Progress of a command: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptool.core.text import duration, duration_range, size
from ckptool.engine.progress import Progress
from ckptool.render.messages import show_step

if TYPE_CHECKING:
    from ckptool.commands.transfer.estimate import Estimate

NO_PROGRESS = "CKPTOOL_NO_PROGRESS"
"""The environment variable that ``--no-progress`` sets."""
INTERVAL = 10.0
"""Seconds between two lines, at least; and before the first one."""

_LOOKS = 0.1
"""Seconds after which it is looked whether more has been done."""


def is_live(*, quiet: bool) -> bool | None:
    """Return whether progress is a live bar, or else lines of a log; None if it is not shown."""
    if quiet or os.environ.get(NO_PROGRESS):
        return None
    return sys.stderr.isatty()


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield progress that is shown, by a thread that looks at it, until the end of the context."""
    progress = Progress()
    live = is_live(quiet=quiet)
    if live is None:
        yield progress
        return
    view = _Bar(progress) if live else Log(progress)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOKS):
            view.look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield progress
    finally:
        ended.set()
        watcher.join()
        view.close()


class _Bar:
    """A bar, which appears once bytes are moved, after notes."""

    def __init__(self, progress: Progress) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            ProgressColumn,
            Task,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars
        from rich.text import Text

        from ckptool.render.text import console

        class Speed(ProgressColumn):
            """Speed in units of 1024, as all sizes are; rich's own counts by the thousand."""

            def render(self, task: Task) -> Text:
                """Return the speed of a task."""
                return Text("" if task.speed is None else f"{size(int(task.speed))}/s")

        columns = (BarColumn(), DownloadColumn(binary_units=True), Speed(), TimeRemainingColumn())
        screen = console(stderr=True)
        self._bars = Bars(*columns, console=screen, transient=True, auto_refresh=False)
        self._task = self._bars.add_task("")
        self._progress = progress
        self._since = 0.0

    def look(self) -> None:
        """Draw what has been done by now."""
        progress = self._progress
        if not progress.done:
            return
        if progress.since != self._since:
            self._since = progress.since
            self._bars.reset(self._task, total=progress.total)
        self._bars.update(self._task, completed=progress.done)
        self._bars.start()
        self._bars.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bars.stop()


def show_estimate(estimate: Estimate | None) -> None:
    """Show how long a transfer will take, and why; nothing if that is not known."""
    if estimate is not None and estimate.most >= INTERVAL:
        took = duration_range(estimate.least, estimate.most)
        rate = f"at {size(int(estimate.rate))}/s, as the source is read now"
        show_step(f"about {took}: {size(estimate.moved)} to read and write, {rate}")


class Log:
    """Lines with the rate and the time left, at most one in ten seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._printed = 0.0
        self._shown = 0

    def look(self) -> None:
        """Print a line if the last one is long ago, and more has been done since."""
        done, total, since = self._progress.done, self._progress.total, self._progress.since
        now = time.monotonic()
        if done in (0, self._shown) or now - max(self._printed, since) < INTERVAL:
            return
        self._printed, self._shown = now, done
        rate = done / (now - since)
        left = duration(max(0, total - done) / rate)
        share = f"{done / total if total else 1:.0%} of {size(total)}"
        show_step(f"{share}, {size(int(rate))}/s, {left} left")

    def close(self) -> None:
        """Print the last line, if it is due."""
        self.look()
