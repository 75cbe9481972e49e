"""Shell completion: the choices of an option, and names of a checkpoint's tensors."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer

_PATIENCE = 1.0
"""Seconds that completion may take."""
_MOST_NAMES = 1000


def complete_from(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes a word, or the last one of ``NAME=WORD`` and ``A,B``."""

    def complete(incomplete: str) -> list[str]:
        begun = re.split(r"[=,]", incomplete)[-1]
        head = incomplete[: len(incomplete) - len(begun)]
        return [f"{head}{word}" for word in choices() if word.startswith(begun)]

    return complete


def complete_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the tensors with this prefix in the checkpoint on the command line.

    Returns none without a checkpoint, of one in a store, and if its metadata takes over a second to
    read.
    """
    arguments = context.args  # of a command line that ends with an option that expects a value
    source = arguments[0] if arguments else context.params.get("source") or "."
    if "://" in source:
        return []
    try:
        with _no_longer_than(_PATIENCE):
            names = _names_in(source)
    except Exception:  # noqa: BLE001 (whatever it is, there is nothing to complete)
        return []
    return [name for name in names if name.startswith(incomplete)][:_MOST_NAMES]


def complete_at_once_in_zsh() -> None:
    """Have typer's script for zsh answer the Tab that loads it, too.

    zsh runs the file as the function that completes; typer's only defines another one by then.
    """
    scripts = import_module("typer._completion_shared")._completion_scripts
    answers = 'if [[ $funcstack[1] == _%(prog_name)s ]]; then %(complete_func)s "$@"; else'
    last = "compdef %(complete_func)s %(prog_name)s"
    if answers not in scripts["zsh"]:
        scripts["zsh"] = scripts["zsh"].replace(last, f"{answers} {last}; fi")


def _names_in(source: str) -> Iterable[str]:
    from pathlib import Path

    from ckptool.commands.open import open_checkpoint
    from ckptool.commands.options.read import ReadOptions

    return open_checkpoint(Path(source), ReadOptions(values=False)).catalog.tensors


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
