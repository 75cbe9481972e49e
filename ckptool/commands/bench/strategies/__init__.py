"""The save strategies: one file per library, and names in the table here."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterable
from importlib.machinery import PathFinder

from ckptool.commands.bench.isolated import search_path
from ckptool.commands.bench.strategies import (
    experimental,
    nvrx,
    torch_checkpointing,
    torch_savers,
)
from ckptool.commands.bench.strategies.base import Strategy
from ckptool.core.text import one_of
from ckptool.errors import UsageError

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for family in (torch_savers, experimental, torch_checkpointing, nvrx)
    for strategy in family.STRATEGIES
}
"""Every strategy by name, in the order of measurement."""


def select_strategies(words: Iterable[str]) -> list[str]:
    """Return the names of the strategies that some ``words`` mean; all if there are none.

    A word is a name, a family (before the ``/``), a glob, or ``MODULE:CLASS`` for a custom saver.
    Raises UsageError if a word matches nothing.
    """
    names = [name for word in words for name in _match(word)]
    return list(dict.fromkeys(names)) or list(STRATEGIES)


def _match(word: str) -> list[str]:
    if ":" in word:
        module = word.partition(":")[0].partition(".")[0]
        if PathFinder.find_spec(module, search_path()) is None:
            raise UsageError(
                f"--strategies {word!r}: there is no module {module!r}",
                hint="PYTHONPATH=FOLDER says where it is, also if that is the current folder",
            )
        return [word]
    names = [
        name
        for name in STRATEGIES
        if name.partition("/")[0] == word or fnmatch.fnmatchcase(name, word)
    ]
    if not names:
        families = dict.fromkeys(name.partition("/")[0] for name in STRATEGIES)
        hint = one_of(word, families)
        raise UsageError(f"--strategies {word!r}: no such strategy", hint=hint)
    return names


def load_strategy(name: str) -> Strategy:
    """Return the strategy of a selected name; UsageError if a custom one does not exist."""
    if ":" not in name:
        return STRATEGIES[name]
    module, _, attribute = name.partition(":")
    try:
        strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--strategies {name}: {error}") from None
    return strategy
