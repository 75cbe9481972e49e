"""What a shell completes: words that an option knows, and names of a checkpoint's tensors."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

_PATIENCE = 1.0
"""Seconds that somebody who presses the tab key waits."""
_MOST_NAMES = 1000


def complete_from(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the function that completes a word, or the last one of ``GLOB=WORD`` and ``A,B``."""

    def complete(incomplete: str) -> list[str]:
        begun = re.split(r"[=,]", incomplete)[-1]
        head = incomplete[: len(incomplete) - len(begun)]
        return [f"{head}{word}" for word in choices() if word.startswith(begun)]

    return complete


def complete_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the tensors of the checkpoint in the line whose names begin so.

    None where there is none, where it is in a store, and where its metadata takes a second to read.
    """
    arguments = context.args  # of a line that ends with an option, where its value is to come
    source = arguments[0] if arguments else context.params.get("source") or "."
    if "://" in source:
        return []
    try:
        with _no_longer_than(_PATIENCE):
            names = _names_in(source)
    except Exception:  # noqa: BLE001 (whatever it is, there is nothing to complete)
        return []
    return [name for name in names if name.startswith(incomplete)][:_MOST_NAMES]


def _names_in(source: str) -> Iterable[str]:
    from pathlib import Path

    from ckptool.commands.open import open_checkpoint
    from ckptool.commands.options.read import ReadOptions

    return open_checkpoint(Path(source), ReadOptions(values=False)).catalog.tensors


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what is done, after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
