"""The named choices of options, for shell completion: each from the table that defines it.

A table's module is imported on request, as options are declared at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any


def _names_in(module: str, name: str, **arguments: Any) -> Callable[[], Iterable[str]]:
    """Return what returns the names in a table of a module, or those that its function returns."""

    def names() -> Iterable[str]:
        table: Any = getattr(import_module(f"ckptool.{module}"), name)
        return table(**arguments) if callable(table) else table  # type: ignore[no-any-return]

    return names


target_names = _names_in("formats", "targets")
mesh_target_names = _names_in("formats", "targets", mesh=True)
builtin_map_names = _names_in("commands.keymap.library", "builtin_maps")
expert_words = _names_in("commands.keymap.library", "EXPERTS")
policy_names = _names_in("core.sharding.placement", "POLICIES")
rank_state_words = _names_in("commands.reshard.rank_state", "WORDS")
code_names = _names_in("commands.verify.codes", "CODES")
strategy_names = _names_in("commands.bench.strategies", "STRATEGIES")


def format_names() -> Iterable[str]:
    """Return the formats that are read."""
    from ckptool.formats import FORMATS

    return (row.name for row in FORMATS.values() if row.reading.is_possible)


def map_names() -> Iterable[str]:
    """Return the names of key maps: the one that selects automatically, and the built-in ones."""
    from ckptool.commands.keymap.library import AUTO

    return (AUTO, *builtin_map_names())


def dtype_names() -> Iterable[str]:
    """Return the floating-point types of weights, under their preferred names."""
    from ckptool.core.dtype import BY_NAME, EXPONENTS, short_name

    types = [dtype.name for dtype in BY_NAME.values() if dtype.kind == "float"]
    names = [name for name in types if name != EXPONENTS]
    return dict.fromkeys((*map(short_name, names), *names))
