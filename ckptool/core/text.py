"""Words of messages: counts with their nouns, and the first of many names."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def plural(count: int, noun: str) -> str:
    """Return ``1 file``, ``4 files``, ``3 boxes``."""
    ending = "" if count == 1 else "es" if noun.endswith("x") else "s"
    return f"{count:,} {noun}{ending}"


def list_some(names: Collection[str], most: int = 8) -> str:
    """Return such as ``a, b, c and 113 more``: the first names, and how many there are besides."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(islice(names, most))}{more}"
