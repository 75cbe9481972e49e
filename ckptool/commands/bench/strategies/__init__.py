"""The save strategies: a family is a file, and a line here."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterable

from ckptool.commands.bench.strategies import (
    blocking,
    dcp_async,
    experimental,
    nvrx,
    torch_checkpointing,
)
from ckptool.commands.bench.strategies.base import Strategy
from ckptool.errors import UsageError

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for family in (blocking, dcp_async, experimental, torch_checkpointing, nvrx)
    for strategy in family.STRATEGIES
}
"""Every strategy by name, in the order in which they are measured."""


def chosen(wanted: Iterable[str]) -> list[str]:
    """The names of the strategies that are ``wanted``; all where nothing is.

    A word is a name, a family (what precedes the ``/``), a glob, or ``MODULE:CLASS`` for a saver
    of one's own. Raises UsageError where a word fits nothing.
    """
    names = [name for word in wanted for name in _matching(word)]
    return list(dict.fromkeys(names)) or list(STRATEGIES)


def _matching(word: str) -> list[str]:
    if ":" in word:
        return [word]
    found = [
        name
        for name in STRATEGIES
        if name.partition("/")[0] == word or fnmatch.fnmatchcase(name, word)
    ]
    if not found:
        families = dict.fromkeys(name.partition("/")[0] for name in STRATEGIES)
        raise UsageError(
            f"--strategies {word!r}: no such strategy", hint="one of " + ", ".join(families)
        )
    return found


def strategy(name: str) -> Strategy:
    """The strategy of a name that ``chosen`` gave; UsageError where an own one is not there."""
    if ":" not in name:
        return STRATEGIES[name]
    module, _, attribute = name.partition(":")
    try:
        found: Strategy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--strategies {name}: {error}") from None
    return found
