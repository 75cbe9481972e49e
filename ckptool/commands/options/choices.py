"""The named choices of options, for shell completion: each from the table that defines it.

A table's module is imported on request, as options are declared at every start.
"""

from __future__ import annotations

from collections.abc import Iterable


def format_names() -> Iterable[str]:
    """Return the formats that are read."""
    from ckptool.formats import FORMATS

    return (row.name for row in FORMATS.values() if row.reading.is_possible)


def target_names() -> Iterable[str]:
    """Return the formats that convert writes."""
    from ckptool.formats import targets

    return targets()


def mesh_target_names() -> Iterable[str]:
    """Return the formats that reshard writes."""
    from ckptool.formats import targets

    return targets(mesh=True)


def builtin_map_names() -> Iterable[str]:
    """Return the key maps that come with ckptool."""
    from ckptool.commands.keymap.library import builtin_maps

    return builtin_maps()


def map_names() -> Iterable[str]:
    """Return the names of key maps: the one that selects automatically, and the built-in ones."""
    from ckptool.commands.keymap.library import AUTO

    return (AUTO, *builtin_map_names())


def expert_words() -> Iterable[str]:
    """Return the ways to store a mixture of experts."""
    from ckptool.commands.keymap.library import EXPERTS

    return EXPERTS


def dtype_names() -> Iterable[str]:
    """Return the floating-point types of weights, under their preferred names."""
    from ckptool.core.dtype import BY_NAME, EXPONENTS, short_name

    types = [dtype.name for dtype in BY_NAME.values() if dtype.kind == "float"]
    names = [name for name in types if name != EXPONENTS]
    return dict.fromkeys((*map(short_name, names), *names))


def policy_names() -> Iterable[str]:
    """Return the placement policies."""
    from ckptool.core.sharding.placement import POLICIES

    return POLICIES


def rank_state_words() -> Iterable[str]:
    """Return the ways to treat state that differs between ranks."""
    from ckptool.commands.reshard.rank_state import WORDS

    return WORDS


def code_names() -> Iterable[str]:
    """Return the finding codes."""
    from ckptool.commands.verify.codes import CODES

    return CODES


def strategy_names() -> Iterable[str]:
    """Return the strategies that bench measures."""
    from ckptool.commands.bench.strategies import STRATEGIES

    return STRATEGIES
