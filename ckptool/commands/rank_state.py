"""State that belongs to one rank: random numbers, data loaders, what differs between ranks."""

from __future__ import annotations

import re
from collections import Counter

from ckptool.core import rewrite
from ckptool.core.catalog import Catalog
from ckptool.errors import CannotDo, UsageError

_WORDS = ("stop", "keep", "drop")
_RANK_STATE = re.compile(r"(?P<name>.*)@rank(?P<rank>\d+)")


def require_rank_state(what: str) -> None:
    """UsageError where ``what`` is neither a word for all of it nor a rank."""
    if what not in _WORDS and not what.isdecimal():
        raise UsageError(f"--rank-state {what!r}", hint="stop, keep, drop, or a rank of the source")


def settled(catalog: Catalog, what: str) -> Catalog:
    """The catalog without, or with all, or with one rank's state that differs between ranks.

    ``what`` is ``drop``, ``keep``, ``stop`` or the number of a rank. CannotDo, with the list, where
    there is such state and it is ``stop``; UsageError where that rank has none.
    """
    if what == "drop":
        return rewrite.drop_names(catalog, filter(_RANK_STATE.fullmatch, _names(catalog)))
    names = [n for n in (*catalog.tensors, *catalog.objects) if _RANK_STATE.fullmatch(n)]
    if not names or what == "keep":
        return catalog
    if what == "stop":
        kinds = Counter(_RANK_STATE.sub(r"\g<name>", name) for name in names)
        listed = ", ".join(list(kinds)[:8]) + (" ..." if len(kinds) > 8 else "")
        raise CannotDo(
            f"{len(kinds)} values differ between the source's ranks: {listed}",
            hint="--rank-state drop leaves them out, keep keeps each as NAME@rankR, 0 takes rank"
            " 0's for all",
        )
    return _taken_from(catalog, names, what)


def names_left_out(before: Catalog, after: Catalog) -> list[str]:
    """One note that names the state of ranks which --rank-state leaves out."""
    kept = set(_names(after))
    gone = [name for name in _names(before) if name not in kept]
    gone = [name for name in gone if _RANK_STATE.sub(r"\g<name>", name) not in kept]
    listed = ", ".join(gone[:8]) + (f", and {len(gone) - 8} more" if len(gone) > 8 else "")
    return [f"left out, as it belongs to one rank: {listed}"] if gone else []


def _names(catalog: Catalog) -> tuple[str, ...]:
    """The names of all tensors and values, and of those that cannot be read."""
    return (*catalog.tensors, *catalog.objects, *catalog.conflicts)


def _taken_from(catalog: Catalog, names: list[str], rank: str) -> Catalog:
    mine = {name for name in names if name.endswith(f"@rank{rank}")}
    if not mine:
        raise UsageError(f"--rank-state {rank!r}: stop, keep, drop or a rank of the source")
    others = [name for name in _names(catalog) if _RANK_STATE.fullmatch(name)]
    kept = rewrite.drop_names(catalog, [n for n in others if not n.endswith(f"@rank{rank}")])
    return rewrite.without_rank(kept, mine)
