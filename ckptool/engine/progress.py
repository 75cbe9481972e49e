"""Progress: who is told how many bytes are read and written, and how many there are in all."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]
"""Takes the number of bytes that were read or written since its last call."""

Started = Callable[[int], Progress]
"""Takes the number of all bytes, once that is known."""


def no_progress(nbytes: int) -> None:
    """Ignore progress."""


def untold(total: int) -> Progress:
    """Return progress that nobody is told of."""
    return no_progress
